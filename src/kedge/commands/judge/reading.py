"""Files of `kedge judge trust`: people's verdicts, a judge's stored ones, and the judge itself.

A row of people's verdicts is `{"prompt": …, "first": …, "second": …, "verdicts": {"person": …}}`: each is first, second
or tie, the prompt is text or messages, and `id` and `models` (who wrote each answer) may be there too. `kedge label
export --as verdicts` writes it. A row of stored verdicts is `{"id": …, "verdict": …}`, null where the judge's reply
could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from kedge.core.errors import DataError
from kedge.core.quoting import quoted
from kedge.core.settings import PathText
from kedge.core.suggest import did_you_mean
from kedge.core.yaml.sections import MAX_LISTED, read_section
from kedge.data.sources import rows
from kedge.feedback.alt_test import Choice
from kedge.feedback.judge_figures import CHOICES
from kedge.rewards.settings import PairwiseJudge

_NEEDED = ("prompt", "first", "second", "verdicts")


class JudgeFile(PairwiseJudge):
    """A judge in a file of its own, where nothing else can be meant."""

    kind: Literal["judge"] = "judge"
    constitution: PathText | None = None
    """A file of principles beside this one, of which one is drawn for every comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanItem:
    """Two answers, and what people said of them."""

    id: str | None
    prompt: tuple[tuple[str, str], ...]
    first: str
    second: str
    verdicts: Mapping[str, Choice]
    models: tuple[str | None, str | None]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    verdict: Choice | None
    probability: float | None


class _Problem(Exception):
    """What is wrong with a row, and in which field."""


def read_judge(file: Path) -> JudgeFile:
    settings, _ = read_section(
        file, JudgeFile, noun="judge file", start="write url and model, for example url: http://localhost:8000/v1"
    )
    return settings


def read_people(file: Path) -> list[HumanItem]:
    """All rows; everything that is wrong with them is one error, with lines and fields."""
    items: list[HumanItem] = []
    problems: list[str] = []
    for where, fields in _rows(file, problems):
        try:
            items.append(_human_item(fields, where))
        except _Problem as problem:
            problems.append(f"{where}: {problem}")
    _refuse(file, problems)
    if not items:
        raise DataError(f"{file}: no rows; `kedge label export --as verdicts` writes people's verdicts")
    return items


def read_stored(file: Path, items: Sequence[HumanItem], on: Path) -> list[StoredVerdict | None]:
    """The stored verdict on each item, by its id; None where the file has none."""
    by_id: dict[str, int] = {}
    for number, item in enumerate(items):
        if item.id is None:
            raise DataError(f"{item.where}: id: missing; stored verdicts (--verdicts {file}) are matched by it")
        if item.id in by_id:
            raise DataError(f"{item.where}: id: {item.id!r} was there before, at {items[by_id[item.id]].where}")
        by_id[item.id] = number
    stored: list[StoredVerdict | None] = [None] * len(items)
    problems: list[str] = []
    for where, fields in _rows(file, problems):
        try:
            identifier = _identifier(fields)
            if identifier is None:
                raise _Problem(f"id: missing; every verdict names its item of {on}")
            if identifier not in by_id:
                raise _Problem(f"id: {identifier!r} is in no row of {on}{did_you_mean(identifier, by_id)}")
            if stored[by_id[identifier]] is not None:
                raise _Problem(f"id: {identifier!r} was there before")
            stored[by_id[identifier]] = _stored_verdict(fields)
        except _Problem as problem:
            problems.append(f"{where}: {problem}")
    _refuse(file, problems)
    return stored


def _rows(file: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows that can be decoded, with their place; the others are problems."""
    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    for row in rows(file):
        where = f"{file}:{row.origin.line}"
        if row.fields is None:
            problems.append(f"{where}: {row.problem}")
        else:
            yield where, row.fields


def _human_item(fields: Mapping[str, Any], where: str) -> HumanItem:
    for name in _NEEDED:
        if name not in fields:
            raise _Problem(f"{name}: missing{did_you_mean(name, fields)}; a row has {', '.join(_NEEDED)}")
    return HumanItem(
        id=_identifier(fields),
        prompt=_prompt(fields["prompt"]),
        first=_text(fields, "first"),
        second=_text(fields, "second"),
        verdicts=_verdicts(fields["verdicts"]),
        models=_models(fields.get("models")),
        where=where,
    )


def _identifier(fields: Mapping[str, Any]) -> str | None:
    identifier = fields.get("id")
    if identifier is None:
        return None
    if isinstance(identifier, bool) or not isinstance(identifier, str | int):
        raise _Problem(f"id: expected text or a whole number, found {quoted(identifier)}")
    return str(identifier)


def _prompt(prompt: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(prompt, str) and prompt.strip():
        return (("user", prompt),)
    turns = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    messages = [cast("dict[str, Any]", turn) for turn in turns if isinstance(turn, dict)]
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    if not pairs or len(pairs) < len(turns) or not all(isinstance(part, str) for pair in pairs for part in pair):
        raise _Problem(f"prompt: expected text, or messages with role and content; found {quoted(prompt)}")
    return tuple(cast("list[tuple[str, str]]", pairs))


def _text(fields: Mapping[str, Any], name: str) -> str:
    text = fields[name]
    if not isinstance(text, str):
        raise _Problem(f"{name}: expected the text of an answer, found {quoted(text)}")
    return text


def _verdicts(verdicts: Any) -> dict[str, Choice]:
    if not isinstance(verdicts, dict) or not verdicts:
        raise _Problem(
            f'verdicts: expected {{"person": "first", "second" or "tie"}} of one person or more; '
            f"found {quoted(verdicts)}"
        )
    by_person = cast("dict[str, Any]", verdicts)
    return {person: _choice(verdict, f"verdicts.{person}") for person, verdict in by_person.items()}


def _choice(verdict: Any, field: str) -> Choice:
    for choice in CHOICES:
        if verdict == choice:
            return choice
    raise _Problem(
        f"{field}: expected first, second or tie; found {quoted(verdict)}{did_you_mean(str(verdict), CHOICES)}"
    )


def _models(models: Any) -> tuple[str | None, str | None]:
    if models is None:
        return None, None
    names = cast("list[Any]", models) if isinstance(models, list) else []
    if len(names) != 2 or not all(name is None or isinstance(name, str) for name in names):
        raise _Problem(f"models: expected the names of the two models that answered; found {quoted(models)}")
    return names[0], names[1]


def _stored_verdict(fields: Mapping[str, Any]) -> StoredVerdict:
    if "verdict" not in fields:
        raise _Problem(f"verdict: missing{did_you_mean('verdict', fields)}; null where the reply could not be read")
    verdict, probability = fields["verdict"], fields.get("probability")
    is_number = isinstance(probability, int | float) and not isinstance(probability, bool)
    if probability is not None and not (is_number and 0 <= cast(float, probability) <= 1):
        raise _Problem(f"probability: expected a number from 0 to 1, that first is better; found {quoted(probability)}")
    return StoredVerdict(
        verdict=None if verdict is None else _choice(verdict, "verdict"),
        probability=None if probability is None else float(probability),
    )


def _refuse(file: Path, problems: Sequence[str]) -> None:
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
        rest = f"\n  … and {len(problems) - MAX_LISTED:,} more" if len(problems) > MAX_LISTED else ""
        raise DataError(f"{file}: {len(problems):,} problem(s)\n{listed}{rest}")
