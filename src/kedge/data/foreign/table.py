"""The table of foreign layouts: by which fields each is known, and what its rows become.

A layout is tried before Kedge's own formats, because its fields say more. One that cannot be read is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.data.examples import Kind
from kedge.data.foreign import pairs, rated
from kedge.data.foreign.pairs import Fields, Pick, Rows
from kedge.data.messages import is_message, is_transcript


def _always(fields: Fields) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`has` are the fields by which it is known, `fits` what they must look like besides. `read` turns one row, or
    with `key` all rows of the same key, into rows of the format called `shape`. `choices` are parts that `columns` may
    set to one of these fields."""

    name: str
    kind: Kind
    shape: str
    has: tuple[str, ...]
    read: Callable[[Rows, Pick], list[dict[str, Any]]]
    fits: Callable[[Fields], bool] = _always
    key: Callable[[Fields], Hashable] | None = None
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    note: str = ""
    """What a reader of `kedge data check` should know: which of several judgements counts, what is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A layout that Kedge knows and cannot train on, and what to do instead."""

    name: str
    has: tuple[str, ...]
    reason: str
    fits: Callable[[Fields], bool] = _always


def _lists(*names: str) -> Callable[[Fields], bool]:
    return lambda fields: all(isinstance(fields[name], list) for name in names)


def _dicts_in(name: str, key: str) -> Callable[[Fields], bool]:
    """Whether `name` is a list of mappings with `key`."""

    def fits(fields: Fields) -> bool:
        items = fields[name]
        return isinstance(items, list) and bool(items) and all(isinstance(i, Mapping) and key in i for i in _any(items))

    return fits


def _any(items: object) -> Iterable[Any]:
    return cast("Iterable[Any]", items)


def _mapping(name: str, *keys: str) -> Callable[[Fields], bool]:
    return lambda fields: isinstance(fields[name], Mapping) and all(key in fields[name] for key in keys)


def _is_sharegpt_pair(fields: Fields) -> bool:
    answers = fields["chosen"], fields["rejected"]
    return all(isinstance(answer, str) or is_message(answer) for answer in answers) and isinstance(
        fields["conversations"], list
    )


_PROMPT_NAMES = ("prompt", "question", "instruction", "query", "problem", "messages", "conversations", "input", "text")


def _is_implicit(fields: Fields) -> bool:
    answers = fields["chosen"], fields["rejected"]
    return all(isinstance(answer, str) and not is_transcript(answer) for answer in answers) and not any(
        fields.get(name) is not None for name in _PROMPT_NAMES
    )


def _is_steps(fields: Fields) -> bool:
    return _lists("completions", "labels")(fields) and all(isinstance(step, str) for step in fields["completions"])


def _is_texts(name: str) -> Callable[[Fields], bool]:
    return lambda fields: isinstance(fields[name], list) and all(isinstance(text, str) for text in _any(fields[name]))


LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="PKU-SafeRLHF",
        kind="pairs",
        shape="pairs",
        has=("prompt", "response_0", "response_1"),
        fits=lambda fields: "better_response_id" in fields or "safer_response_id" in fields,
        read=pairs.pku,
        choices={"better": ("better_response_id", "safer_response_id")},
        note="two preferences: where they differ, columns: {better: better_response_id | safer_response_id} must say "
        "which one counts",
    ),
    Layout(
        name="HelpSteer3 (preference)",
        kind="pairs",
        shape="pairs",
        has=("context", "response1", "response2", "overall_preference"),
        read=pairs.helpsteer3,
        note="overall_preference below 0: response1 is better; above 0: response2; 0 is a tie and gives no pair",
    ),
    Layout(
        name="HelpSteer2 (preference)",
        kind="pairs",
        shape="pairs",
        has=("prompt", "response_1", "response_2", "preference_strength"),
        read=pairs.helpsteer2,
        note="preference_strength below 0: response_1 is better; above 0: response_2; 0 is a tie and gives no pair",
    ),
    Layout(
        name="HelpSteer",
        kind="rankings",
        shape="scored answers",
        has=("prompt", "response", *rated.STEER_ATTRIBUTES),
        read=rated.helpsteer,
        key=rated.by_prompt,
        choices={"score": rated.STEER_ATTRIBUTES},
        note="responses to a prompt are ranked by `helpfulness`; columns: {score: correctness} takes another rating",
    ),
    Layout(
        name="SHP",
        kind="pairs",
        shape="pairs",
        has=("history", "human_ref_A", "human_ref_B", "labels"),
        read=pairs.shp,
        note="labels 1: A is better, 0: B",
    ),
    Layout(
        name="question with response_j and response_k",
        kind="pairs",
        shape="pairs",
        has=("question", "response_j", "response_k"),
        read=pairs.stack_exchange,
        note="response_j is the better one",
    ),
    Layout(
        name="arena conversations",
        kind="pairs",
        shape="conversation pairs",
        has=("conversation_a", "conversation_b", "winner"),
        fits=_lists("conversation_a", "conversation_b"),
        read=pairs.arena,
        note="ties give no pair",
    ),
    Layout(
        name="arena answers",
        kind="pairs",
        shape="conversation pairs",
        has=("prompt", "response_a", "response_b"),
        fits=lambda fields: "winner" in fields or "winner_model_a" in fields,
        read=pairs.arena_answers,
        note="ties give no pair",
    ),
    Layout(
        name="AlpacaFarm",
        kind="pairs",
        shape="pairs",
        has=("instruction", "output_1", "output_2", "preference"),
        read=pairs.alpaca_farm,
        note="preference below 1.5: output_1 is better; above: output_2; 1.5 and 0 are ties and give no pair",
    ),
    Layout(
        name="summarize_from_feedback (comparisons)",
        kind="pairs",
        shape="pairs",
        has=("info", "summaries", "choice"),
        fits=_mapping("info"),
        read=pairs.summarize,
        note="the prompt is the post or news article with its title and TL;DR:",
    ),
    Layout(
        name="WebGPT comparisons",
        kind="pairs",
        shape="pairs",
        has=("question", "answer_0", "answer_1", "score_0", "score_1"),
        read=pairs.webgpt,
        note="equal scores give no pair; quotes are not part of the prompt",
    ),
    Layout(
        name="OpenAI preference",
        kind="pairs",
        shape="pairs",
        has=("input", "preferred_output", "non_preferred_output"),
        fits=_mapping("input", "messages"),
        read=pairs.openai,
    ),
    Layout(
        name="LLaMA-Factory ShareGPT pairs",
        kind="pairs",
        shape="pairs",
        has=("conversations", "chosen", "rejected"),
        fits=_is_sharegpt_pair,
        read=pairs.sharegpt,
    ),
    Layout(
        name="ms-swift pairs",
        kind="pairs",
        shape="pairs",
        has=("messages", "rejected_response"),
        read=pairs.swift,
    ),
    Layout(
        name="Alpaca pairs (output: [better, worse])",
        kind="pairs",
        shape="pairs",
        has=("instruction", "output"),
        fits=_is_texts("output"),
        read=pairs.alpaca_list,
    ),
    Layout(
        name="TRL pairs with the prompt in both texts",
        kind="pairs",
        shape="pairs",
        has=("chosen", "rejected"),
        fits=_is_implicit,
        read=pairs.implicit,
        note="the prompt is what both texts begin with",
    ),
    Layout(
        name="UltraFeedback",
        kind="rankings",
        shape="scored answers",
        has=("instruction", "completions"),
        fits=_dicts_in("completions", "response"),
        read=rated.ultrafeedback,
        choices={"score": rated.FEEDBACK_SCORES},
        note="ranked by `fine-grained_score`, the mean of the four ratings; columns: {score: overall_score} takes the "
        "other one",
    ),
    Layout(
        name="Nectar",
        kind="rankings",
        shape="rankings",
        has=("prompt", "answers"),
        fits=_dicts_in("answers", "answer"),
        read=rated.nectar,
    ),
    Layout(
        name="BeaverTails",
        kind="thumbs",
        shape="thumbs",
        has=("prompt", "response", "is_safe"),
        read=rated.beavertails,
        note="a safe answer is a good one, an unsafe answer a bad one",
    ),
    Layout(
        name="stepwise supervision",
        kind="thumbs",
        shape="thumbs",
        has=("prompt", "completions", "labels"),
        fits=_is_steps,
        read=rated.stepwise,
        note="these are labels of steps, and Kedge trains no process reward: an answer counts as good where all of its "
        "steps are; the steps and their labels are kept as `steps` and `step_labels`",
    ),
    Layout(
        name="OASST trees",
        kind="rankings",
        shape="rankings",
        has=("message_tree_id", "prompt"),
        fits=_mapping("prompt", "text", "role"),
        read=rated.oasst_tree,
        note="a ranking wherever a message has several answers with places; other messages compare nothing",
    ),
    Layout(
        name="OASST messages",
        kind="rankings",
        shape="rankings",
        has=("message_id", "message_tree_id", "text", "role"),
        read=rated.oasst_flat,
        key=rated.tree_id,
        note="a ranking wherever a message has several answers with places; other messages compare nothing",
    ),
    Layout(
        name="verl",
        kind="prompts",
        shape="prompts",
        has=("prompt", "reward_model"),
        fits=_mapping("reward_model"),
        read=rated.verl,
        note="reward_model.ground_truth is the checkable answer; where reward_model.style is model it is none, and "
        "stays in extra",
    ),
)

RATED = Layout(
    name="rated answers",
    kind="rankings",
    shape="scored answers",
    has=("prompt", "completion", "score"),
    read=rated.rated,
    key=rated.by_prompt,
    note="the answers to a prompt are ranked by their score; a prompt with one answer compares nothing",
)
"""Read only where `columns` names the score: a number beside an answer may mean anything."""

REFUSED: tuple[Refused, ...] = (
    Refused(
        name="summarize_from_feedback (axis)",
        has=("info", "summary"),
        fits=_mapping("summary", "axes"),
        reason="it rates single summaries on several axes; take the comparisons of the same dataset",
    ),
    Refused(
        name="PRM800K",
        has=("question", "label"),
        fits=_mapping("label", "steps"),
        reason="it labels steps, and Kedge trains no process reward; turn it into `prompt`, `completions`, `labels`",
    ),
    Refused(
        name="Math-Shepherd",
        has=("input", "label", "task"),
        fits=lambda fields: "ки" in str(fields["input"]),
        reason="its steps are marked inside the text; turn it into `prompt`, `completions` (a list of steps), `labels`",
    ),
)


def layout_of(fields: Fields) -> Layout | None:
    """The foreign layout that a row has; a DataError where it is one that cannot be read."""
    for refused in REFUSED:
        if _has(fields, refused.has) and refused.fits(fields):
            raise DataError(f"this is {refused.name} data, which Kedge does not read: {refused.reason}")
    return next((layout for layout in LAYOUTS if _has(fields, layout.has) and layout.fits(fields)), None)


def _has(fields: Fields, names: Iterable[str]) -> bool:
    return all(fields.get(name) is not None for name in names)


def rewritten(layout: Layout, rows: Rows, pick: Pick) -> list[dict[str, Any]]:
    """The canonical rows that a row, or a group of rows, of this layout holds: none where it prefers nothing."""
    try:
        return layout.read(rows, pick)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"not a row of {layout.name}: {reason}") from error
