"""Items before they are in a store, and the files that hold them: Kedge's pairs, rankings, thumbs and prompts; the
answers of `evaluate`; tasks. Reading them needs no store.

A task is a row with a `prompt` and `answers`, each a text or `{text, model, seed, scores}`; it may say `priority`,
`propensity` with its `reason`, `round`, `language`, `heldout`, `harmful`, `origin`, and for gold `expected`,
`tolerance`, `explanation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kedge.core.errors import ConfigError, DataError
from kedge.core.suggest import did_you_mean
from kedge.data.decode import Row
from kedge.data.examples import Example, Message, Messages, Pair, Prompt, Ranking, Thumb
from kedge.data.messages import as_messages
from kedge.data.reading import read
from kedge.data.sources import rows

_ANSWER_FIELDS = {"id", "model", "prompt", "answer", "scores"}
_GOLD_STEP, _GOLD_TOLERANCE = -2, 1
"""Any step towards the chosen answer, which has place 0, is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer:
    text: Messages
    model: str | None = None
    seed: int | None = None
    scores: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """The right verdict, by places: a step for two answers, ranks for more, −1 or 1 for one; and how far off still
    counts as right: steps, or swapped neighbours."""

    expected: int | tuple[int, ...]
    tolerance: int = 0
    explanation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An item before it is in the store."""

    prompt: Messages
    answers: tuple[DraftAnswer, ...] = ()
    priority: float = 0.0
    propensity: float | None = None
    round: int = 0
    is_heldout: bool = False
    is_harmful: bool = False
    language: str | None = None
    origin: str | None = None
    gold: Gold | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: Any
    model: str | None = None
    seed: int | None = None
    scores: dict[str, float | None] | None = None


class _Task(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Any
    answers: list[Any] = []
    id: Any = None
    priority: float = 0.0
    propensity: float | None = None
    reason: str | None = None
    round: int = 0
    language: str | None = None
    heldout: bool = False
    harmful: bool = False
    origin: str | None = None
    expected: int | list[int] | None = None
    tolerance: int | None = None
    explanation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What a file holds. `equal` pairs have the same answer twice, and are left out."""

    layout: str
    drafts: Sequence[Draft]
    equal: int


def read_items(source: str, *, gold: bool = False, baseline: str | None = None, ranks: bool = False) -> Incoming:
    """The items of a file. Answers of several models are ranked with `ranks`, else compared with those of `baseline`,
    by default the first model in the file."""
    sample = list(islice(rows(source), 1))
    fields = (sample[0].fields or {}) if sample else {}
    if baseline is not None and not fields.keys() >= _ANSWER_FIELDS:
        raise ConfigError(f"--baseline {baseline}: {source} holds no answers of models")
    if fields.keys() >= _ANSWER_FIELDS:
        if gold:
            raise DataError(f"{source}: answers of models say nothing of which is right; gold needs pairs or tasks")
        layout, drafts = "answers", list(_of_answers(source, baseline, ranks=ranks))
    elif "answers" in fields and not fields.keys() & {"rank", "ranks", "ranking", "scores"}:
        layout, drafts = "tasks", [_of_task(row, gold=gold) for row in rows(source)]
    else:
        reading = read(source)
        if reading.kind == "demonstrations":
            raise DataError(
                f"{source}: holds demonstrations; there is nothing to ask about them. Pairs, rankings, "
                "thumbs, prompts, tasks and answers of `evaluate` can be labelled"
            )
        layout, drafts = reading.kind, [_of_example(example, gold=gold) for example in reading]
    different = [draft for draft in drafts if not _is_equal(draft)]
    return Incoming(layout=layout, drafts=different, equal=len(drafts) - len(different))


def _is_equal(draft: Draft) -> bool:
    return len(draft.answers) == 2 and draft.answers[0].text == draft.answers[1].text


def _of_example(example: Example, *, gold: bool) -> Draft:
    match example:
        case Pair(chosen=chosen, rejected=rejected):
            answers, expected = (chosen, rejected), Gold(expected=_GOLD_STEP, tolerance=_GOLD_TOLERANCE)
        case Ranking(answers=answers, rank=rank):
            expected = Gold(expected=rank)
            if len(answers) == 2:
                expected = _gold_of_two(rank)
        case Thumb(answer=answer, is_good=is_good):
            answers, expected = (answer,), Gold(expected=1 if is_good else -1)
        case _:
            answers, expected = (), None
    if gold and expected is None:
        raise DataError(f"{example.origin}: a bare prompt says nothing of what is right; gold needs a verdict")
    prompt = example.prompt if isinstance(example, Pair | Ranking | Thumb | Prompt) else ()
    language = example.extra.get("language")
    return Draft(
        prompt=prompt,
        answers=tuple(DraftAnswer(text=answer) for answer in answers),
        language=language if isinstance(language, str) else None,
        origin=str(example.origin),
        gold=expected if gold else None,
    )


def _gold_of_two(rank: Sequence[int]) -> Gold:
    if rank[0] == rank[1]:
        return Gold(expected=0)
    return Gold(expected=_GOLD_STEP if rank[0] < rank[1] else -_GOLD_STEP, tolerance=_GOLD_TOLERANCE)


def _of_task(row: Row, *, gold: bool) -> Draft:
    if row.fields is None:
        raise DataError(f"{row.origin}: {row.problem}")
    try:
        task = _Task.model_validate(row.fields)
        answers = [
            _Answer.model_validate(value if isinstance(value, Mapping) and "text" in value else {"text": value})
            for value in task.answers
        ]
        prompt = as_messages(task.prompt, text_role="user", field="prompt")
        texts = [as_messages(answer.text, text_role="assistant", field="answers") for answer in answers]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        known = [*_Task.model_fields, *_Answer.model_fields]
        hint = did_you_mean(field, known) if first["type"] == "extra_forbidden" else ""
        raise DataError(f"{row.origin}: field '{field}': {first['msg']}{hint}") from error
    except DataError as error:
        raise DataError(f"{row.origin}: {error}") from error
    return Draft(
        prompt=prompt,
        answers=tuple(
            DraftAnswer(text=text, model=answer.model, seed=answer.seed, scores=answer.scores)
            for text, answer in zip(texts, answers, strict=True)
        ),
        priority=task.priority,
        propensity=task.propensity,
        round=task.round,
        is_heldout=task.heldout,
        is_harmful=task.harmful,
        language=task.language,
        origin=task.origin or str(row.origin),
        gold=_task_gold(task, row) if gold else None,
    )


def _task_gold(task: _Task, row: Row) -> Gold:
    count, expected = len(task.answers), task.expected
    allowed = {1: (-1, 1), 2: range(-3, 4)}.get(count)
    is_fit = (
        isinstance(expected, int) and expected in allowed
        if allowed is not None
        else isinstance(expected, list) and len(expected) == count and all(1 <= rank <= count for rank in expected)
    )
    if not is_fit or expected is None or not count:
        wants = {0: "nothing: there is no answer", 1: "-1 or 1", 2: "a step from -3 to 3"}.get(count, f"{count} places")
        raise DataError(f"{row.origin}: field 'expected' is {expected!r}; gold with {count} answers needs {wants}")
    default = _GOLD_TOLERANCE if count == 2 else 0
    return Gold(
        expected=expected if isinstance(expected, int) else tuple(expected),
        tolerance=default if task.tolerance is None else task.tolerance,
        explanation=task.explanation,
    )


def answer_pairs(source: str, baseline: str | None) -> tuple[str, list[tuple[str, Draft]]]:
    """The baseline, by default the first model of the file; and every other model's answers beside it, as items."""
    models, prompts = _answers(source)
    first = _baseline(source, baseline, models)
    if len(models) < 2:
        raise DataError(f"{source}: answers of one model alone ({first}); a comparison needs two")
    pairs = [
        (model, _evaluated(prompt, pair, source))
        for prompt, answers in prompts.items()
        for model in models
        if model != first
        for pair in zip(answers.get(first, ()), answers.get(model, ()), strict=False)
    ]
    return first, pairs


def _of_answers(source: str, baseline: str | None, *, ranks: bool) -> Iterator[Draft]:
    """Answers of models to the same prompts, as `evaluate` writes them: all of a prompt in one item, or two each."""
    if not ranks:
        yield from (draft for _, draft in answer_pairs(source, baseline)[1])
        return
    models, prompts = _answers(source)
    _baseline(source, baseline, models)
    for prompt, answers in prompts.items():
        yield _evaluated(prompt, tuple(answer for group in answers.values() for answer in group), source)


def _evaluated(prompt: Messages, answers: tuple[DraftAnswer, ...], source: str) -> Draft:
    """Held out: nobody is to be trained on what models are measured by."""
    return Draft(prompt=prompt, answers=answers, is_heldout=True, origin=source)


def _baseline(source: str, baseline: str | None, models: Sequence[str]) -> str:
    first = baseline or models[0]
    if first not in models:
        raise ConfigError(f"--baseline {first}: {source} has {', '.join(models)}{did_you_mean(first, models)}")
    return first


def _answers(source: str) -> tuple[list[str], dict[Messages, dict[str, list[DraftAnswer]]]]:
    """The models, and by prompt the answers of each."""
    prompts: dict[Messages, dict[str, list[DraftAnswer]]] = {}
    models: dict[str, None] = {}
    for row in rows(source):
        fields = _answer_fields(row)
        prompt = as_messages(fields["prompt"], text_role="user", field="prompt")
        model = str(fields["model"])
        seed = fields.get("seed")
        answer = DraftAnswer(
            text=(Message("assistant", str(fields["answer"])),),
            model=model,
            seed=seed if isinstance(seed, int) else None,
            scores=fields.get("scores"),
        )
        models[model] = None
        prompts.setdefault(prompt, {}).setdefault(model, []).append(answer)
    return list(models), prompts


def _answer_fields(row: Row) -> Mapping[str, Any]:
    if row.fields is None:
        raise DataError(f"{row.origin}: {row.problem}")
    missing = [name for name in sorted(_ANSWER_FIELDS - {"id", "scores"}) if row.fields.get(name) is None]
    if missing:
        raise DataError(f"{row.origin}: field '{missing[0]}' is missing (found: {', '.join(row.fields)})")
    return row.fields
