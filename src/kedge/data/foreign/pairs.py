"""Readers of pairs in foreign layouts: rows in, canonical rows `prompt`, `chosen`, `rejected` out. A tie gives none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.data.foreign.labels import finite
from kedge.data.messages import is_conversation, shown

Fields = Mapping[str, Any]
Rows = Sequence[Fields]
Pick = Mapping[str, str]
"""Which field a layout's choice fell on: {"better": "safer_response_id"}."""

_STEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
_LEAST_PREFIX_WORDS = 2


def canonical(fields: Fields, used: Sequence[str], **own: Any) -> dict[str, Any]:
    """A canonical row; the fields that were not used are kept in `extra`."""
    rest = {name: value for name, value in fields.items() if name not in used}
    return {**own, "extra": rest} if rest else own


def two(fields: Fields, prompt: Any, answers: Sequence[Any], better: int | None, used: Sequence[str]) -> list[Any]:
    """The pair in which answer `better` of two is chosen; none where neither is."""
    if better is None:
        return []
    return [canonical(fields, used, prompt=prompt, chosen=answers[better], rejected=answers[1 - better])]


def pku(rows: Rows, pick: Pick) -> list[Any]:
    """PKU-SafeRLHF: `better_response_id` (helpful) and `safer_response_id` (harmless) may name different answers."""
    (fields,) = rows
    axes = {name: fields[name] for name in ("better_response_id", "safer_response_id") if fields.get(name) is not None}
    axis = pick.get("better")
    if axis is None and len(set(axes.values())) > 1:
        raise DataError(AXES_DIFFER)
    axis = axis or next(iter(axes))
    if fields.get(axis) not in (0, 1):
        raise DataError(f"'{axis}' is {shown(fields.get(axis))}; it must be 0 or 1, the number of the better response")
    answers = fields["response_0"], fields["response_1"]
    return two(fields, fields["prompt"], answers, int(fields[axis]), ("prompt", "response_0", "response_1"))


AXES_DIFFER = (
    "PKU-SafeRLHF has two preferences, and here they name different answers: 'better_response_id' is about help, "
    "'safer_response_id' about harm. Say which one counts: columns: {better: better_response_id} or "
    "columns: {better: safer_response_id}"
)


def steer_prompt(value: Any) -> Any:
    """HelpSteer writes turns into one text, with `<extra_id_1>Assistant` and `<extra_id_1>User` between them."""
    if not isinstance(value, str) or "<extra_id_1>" not in value:
        return value
    first, *rest = _STEER_TURN.split(value)
    turns = [("User", first), *zip(rest[::2], rest[1::2], strict=True)]
    return [{"role": role.lower(), "content": text} for role, text in turns]


def _signed(value: Any, field: str) -> int | None:
    """Below 0 the first answer is better, above 0 the second."""
    number = finite(value, field)
    return None if number == 0 else int(number > 0)


def helpsteer3(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    better = _signed(fields["overall_preference"], "overall_preference")
    answers = fields["response1"], fields["response2"]
    return two(fields, fields["context"], answers, better, ("context", "response1", "response2"))


def helpsteer2(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    better = _signed(fields["preference_strength"], "preference_strength")
    answers = fields["response_1"], fields["response_2"]
    return two(fields, steer_prompt(fields["prompt"]), answers, better, ("prompt", "response_1", "response_2"))


def shp(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    if fields["labels"] not in (0, 1):
        raise DataError(f"'labels' is {shown(fields['labels'])}; 1 says that A is better, 0 that B is")
    answers = fields["human_ref_A"], fields["human_ref_B"]
    return two(fields, fields["history"], answers, 1 - int(fields["labels"]), ("history", "human_ref_A", "human_ref_B"))


def stack_exchange(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    answers = fields["response_j"], fields["response_k"]
    return two(fields, fields["question"], answers, 0, ("question", "response_j", "response_k"))


_WINNERS: Mapping[str, int | None] = {
    **dict.fromkeys(("model_a", "a", "model a", "response_a", "conversation_a"), 0),
    **dict.fromkeys(("model_b", "b", "model b", "response_b", "conversation_b"), 1),
    **dict.fromkeys(("tie", "tie (bothbad)", "tie(bothbad)", "both_bad", "bothbad", "both_good"), None),
}


def _winner(fields: Fields) -> int | None:
    name = str(fields["winner"]).strip().lower()
    if name not in _WINNERS:
        raise DataError(f"'winner' is {shown(fields['winner'])}; it must be model_a, model_b or a tie")
    return _WINNERS[name]


def arena(rows: Rows, pick: Pick) -> list[Any]:
    """Two whole conversations with the same questions; the pair parts where the answers do."""
    (fields,) = rows
    talks = fields["conversation_a"], fields["conversation_b"]
    better = _winner(fields)
    if better is None:
        return []
    return [canonical(fields, ("conversation_a", "conversation_b"), chosen=talks[better], rejected=talks[1 - better])]


def arena_answers(rows: Rows, pick: Pick) -> list[Any]:
    """`prompt`, `response_a`, `response_b`, each one text or one text a turn, and `winner` or `winner_model_a` and so
    on as 0 and 1."""
    (fields,) = rows
    if "winner" in fields:
        better = _winner(fields)
    else:
        flags = [finite(fields.get(f"winner_{name}", 0), f"winner_{name}") for name in ("model_a", "model_b")]
        better = None if flags[0] == flags[1] else int(flags[1] > flags[0])
    if better is None:
        return []
    asked, *replies = (_texts(fields[name]) for name in ("prompt", "response_a", "response_b"))
    talks = [_interleaved(asked, texts) for texts in replies]
    used = ("prompt", "response_a", "response_b")
    return [canonical(fields, used, chosen=talks[better], rejected=talks[1 - better])]


def _texts(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    return cast(list[Any], value) if isinstance(value, list) else [value]


def _interleaved(asked: Sequence[Any], replies: Sequence[Any]) -> list[dict[str, Any]]:
    if len(asked) != len(replies):
        raise DataError(f"{len(asked)} turns of the prompt and {len(replies)} of an answer; they must be as many")
    return [
        {"role": role, "content": text}
        for turn in zip(asked, replies, strict=True)
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def alpaca_farm(rows: Rows, pick: Pick) -> list[Any]:
    """AlpacaFarm and AlpacaEval: `preference` is 1 for output_1, 2 for output_2, or between them as a weight."""
    (fields,) = rows
    number = finite(fields["preference"], "preference")
    if not (number == 0 or 1 <= number <= 2):
        raise DataError(f"'preference' is {shown(number)}; it must be 1 (output_1), 2 (output_2), or a tie (1.5 or 0)")
    better = None if number in (0, 1.5) else int(number > 1.5)
    answers = fields["output_1"], fields["output_2"]
    used = ("instruction", "input", "output_1", "output_2")
    context = fields.get("input")
    prompt = f"{fields['instruction']}\n\n{context}" if isinstance(context, str) and context.strip() else None
    return two(fields, prompt or fields["instruction"], answers, better, used)


def summarize(rows: Rows, pick: Pick) -> list[Any]:
    """openai/summarize_from_feedback, comparisons: the post or article as a prompt that asks for its TL;DR."""
    (fields,) = rows
    info, summaries = fields["info"], fields["summaries"]
    if fields["choice"] not in (0, 1) or len(summaries) != 2:
        raise DataError(f"'choice' is {shown(fields['choice'])}; it must be 0 or 1, one of two summaries")
    heads = (("SUBREDDIT: r/", "subreddit"), ("TITLE: ", "title"), ("POST: ", "post"), ("", "article"))
    parts = [f"{head}{info[name]}" for head, name in heads if info.get(name)]
    answers = [summary["text"].strip() for summary in summaries]
    prompt = "\n\n".join([*parts, "TL;DR:"])
    return two(fields, prompt, answers, int(fields["choice"]), ("info", "summaries"))


def webgpt(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    first, second = (finite(fields[name], name) for name in ("score_0", "score_1"))
    question = fields["question"]
    prompt = question["full_text"] if isinstance(question, Mapping) else question
    better = None if first == second else int(second > first)
    return two(fields, prompt, (fields["answer_0"], fields["answer_1"]), better, ("question", "answer_0", "answer_1"))


def openai(rows: Rows, pick: Pick) -> list[Any]:
    (fields,) = rows
    asked = cast(Mapping[str, Any], fields["input"])
    used = ("input", "preferred_output", "non_preferred_output")
    tools = {"tools": asked["tools"]} if asked.get("tools") else {}
    answers = {"chosen": fields["preferred_output"], "rejected": fields["non_preferred_output"]}
    return [canonical(fields, used, prompt=asked["messages"], **answers, **tools)]


def sharegpt(rows: Rows, pick: Pick) -> list[Any]:
    """LLaMA-Factory: the prompt as `conversations`, and the two answers as one message each."""
    (fields,) = rows
    used = ("conversations", "chosen", "rejected", "system", "tools")
    own = {name: fields[name] for name in ("chosen", "rejected", "system", "tools") if fields.get(name) is not None}
    return [canonical(fields, used, prompt=fields["conversations"], **own)]


def swift(rows: Rows, pick: Pick) -> list[Any]:
    """ms-swift: a whole conversation, and in `rejected_response` what its last answer is better than."""
    (fields,) = rows
    messages = fields["messages"]
    if not is_conversation(messages) or len(messages) < 2:
        raise DataError(f"'messages' is {shown(messages)}; it must be a conversation that ends with the better answer")
    own = {name: fields[name] for name in ("system", "tools") if fields.get(name) is not None}
    answers = {"chosen": messages[-1:], "rejected": fields["rejected_response"]}
    return [canonical(fields, ("messages", "rejected_response", *own), prompt=messages[:-1], **answers, **own)]


def alpaca_list(rows: Rows, pick: Pick) -> list[Any]:
    """Alpaca with `output: [better, worse]`."""
    (fields,) = rows
    answers = fields["output"]
    if len(answers) != 2:
        raise DataError(f"'output' has {len(answers)} answers; as a pair it is [the better one, the worse one]")
    own = {name: fields[name] for name in ("instruction", "input", "system", "history") if fields.get(name) is not None}
    return [canonical(fields, ("output", *own), chosen=answers[0], rejected=answers[1], **own)]


def implicit(rows: Rows, pick: Pick) -> list[Any]:
    """TRL's standard format without a prompt: it is what both texts begin with, up to the end of a word."""
    (fields,) = rows
    chosen, rejected = fields["chosen"], fields["rejected"]
    differs = (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    shared = chosen[: next(differs, min(len(chosen), len(rejected)))]
    if chosen != rejected:
        shared = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if len(shared.split()) < _LEAST_PREFIX_WORDS:
        raise DataError(
            "'chosen' and 'rejected' stand without a prompt and do not begin with the same words; if another field "
            "holds the prompt, say which: columns: {prompt: NAME}"
        )
    answers = {"chosen": chosen[len(shared) :].strip(), "rejected": rejected[len(shared) :].strip()}
    return [canonical(fields, ("chosen", "rejected"), prompt=shared.strip(), **answers)]
