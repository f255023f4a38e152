"""Items that the baseline did better than a model, with both answers, and the command that makes a badcase of one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import orjson

from kedge.commands.board.exams import ExamColumn, Sat
from kedge.commands.board.models import Known
from kedge.core.errors import DataError
from kedge.exams.items import hash_of_text
from kedge.exams.rows import ItemRow
from kedge.gate.evidence import ANSWERS
from kedge.report.board.records import Lost, LostItem
from kedge.report.words import cut

MOST = 300
"""Lost items that a page shows."""
LONGEST = 2000
"""Characters of a text that it shows."""
Wanted = tuple[Path, str, str, str]
"""A folder, an exam, what the folder calls the model, and an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    column: ExamColumn
    model: Known
    own: ItemRow
    other: ItemRow

    @property
    def size(self) -> float:
        return abs(self.own.score - self.other.score)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A row of a file of answers, and the text that was graded."""

    row: Mapping[str, Any]
    text: str
    is_written: bool
    """Whether the row has this text as its answer."""


def lost_items(columns: Sequence[ExamColumn], models: Sequence[Known], baseline: Known, problems: list[str]) -> Lost:
    """The largest losses first, of all models and exams in turn, so that none crowds out the others."""
    by_kind = [
        sorted(_losses(column, model, baseline), key=lambda loss: -loss.size)
        for column in columns
        if column.column.is_main
        for model in models
        if model is not baseline
    ]
    count = sum(map(len, by_kind))
    chosen = [loss for loss in chain.from_iterable(zip_longest(*by_kind)) if loss is not None][: 2 * MOST]
    wanted = {key for loss in chosen for key in (_key(loss, loss.model), _key(loss, baseline))}
    answers = _answers(wanted, problems)
    items: list[LostItem] = []
    unanswered = 0
    for loss in chosen:
        own, other = (
            _answer_of(answers.get(_key(loss, model), ()), row)
            for model, row in ((loss.model, loss.own), (baseline, loss.other))
        )
        if own is None or other is None:
            unanswered += 1
        elif len(items) < MOST:
            items.append(_lost_item(loss, own, other))
    order = {model: place for place, model in enumerate(model.label for model in models)}
    items.sort(key=lambda item: (order[item.model], item.column))
    return Lost(items=tuple(items), count=count, unanswered=unanswered)


def _losses(column: ExamColumn, model: Known, baseline: Known) -> Iterator[_Loss]:
    if model not in column.sat or baseline not in column.sat:
        return
    sign = -1 if column.column.better == "less" else 1
    others = {row.item: row for row in column.sat[baseline].rows}
    for row in column.sat[model].rows:
        other = others.get(row.item)
        if other is not None and sign * (row.score - other.score) < 0:
            yield _Loss(column=column, model=model, own=row, other=other)


def _sat(loss: _Loss, model: Known) -> Sat:
    return loss.column.sat[model]


def _key(loss: _Loss, model: Known) -> Wanted:
    sat = _sat(loss, model)
    return sat.folder, loss.own.exam, sat.name, loss.own.item


def _answers(wanted: set[Wanted], problems: list[str]) -> dict[Wanted, list[Mapping[str, Any]]]:
    """The rows of files of answers about these items; parts of an item (`item:3`) are in the rows of the whole."""
    found: dict[Wanted, list[Mapping[str, Any]]] = {}
    for folder in sorted({key[0] for key in wanted}):
        whole: dict[Wanted, set[Wanted]] = {}
        for key in wanted:
            if key[0] == folder:
                for item in (key[3], key[3].rpartition(":")[0]):
                    whole.setdefault((*key[:3], item), set()).add(key)
        try:
            for row in _rows(folder / ANSWERS):
                for key in whole.get((folder, row["exam"], row["model"], row["item"]), ()):
                    found.setdefault(key, []).append(row)
        except DataError as error:
            problems.append(str(error))
    return found


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    if not file.is_file():
        raise DataError(f"{file}: not there, so that its items are not shown; run the exam again")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row: dict[str, Any] = orjson.loads(line)
                _ = row["exam"], row["model"], row["item"], hash_of_text(row["answer"]), _turns(row)
                _ = [hash_of_text(choice) for choice in row.get("choices", ())]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{file}:{number}: not an answer to an exam ({error}); run the exam again") from error
            yield row


def _answer_of(rows: Sequence[Mapping[str, Any]], item: ItemRow) -> _Answer | None:
    """The answer that was graded, by its hash; of choices the one that was graded, which need not be the likeliest as a
    whole. Else the first one about the item."""
    for row in rows:
        if hash_of_text(row["answer"]) == item.answer:
            return _Answer(row=row, text=row["answer"], is_written=True)
    for row in rows:
        for choice in row.get("choices", ()):
            if hash_of_text(choice) == item.answer:
                return _Answer(row=row, text=choice, is_written=False)
    return _Answer(row=rows[0], text=rows[0]["answer"], is_written=True) if rows else None


def _turns(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    prompt: str | Iterable[Mapping[str, Any]] = row["prompt"]
    if isinstance(prompt, str):
        return (("user", prompt),)
    return tuple((str(turn["role"]), str(turn["content"])) for turn in prompt)


def _lost_item(loss: _Loss, own: _Answer, other: _Answer) -> LostItem:
    command, source, problem = "", None, "its file of answers has no ids; run the exam again"
    if not own.is_written:
        problem = "a choice by its likelihood, which nobody wrote"
    elif own.row.get("id") is not None:
        file = _sat(loss, loss.model).folder / ANSWERS
        source = str(file), str(own.row["id"])
        command = badcase_command(file, source[1])
    choices: list[Any] = own.row.get("choices") or []
    return LostItem(
        model=loss.model.label,
        column=f"{loss.column.column.title}.{loss.column.column.metric}",
        item=loss.own.item,
        score=loss.own.score,
        baseline_score=loss.other.score,
        prompt=tuple((role, cut(text, LONGEST)) for role, text in _turns(own.row)),
        choices=tuple(cut(str(choice), LONGEST) for choice in choices if len(str(choice)) > 1),
        answer=cut(own.text, LONGEST),
        baseline_answer=cut(other.text, LONGEST),
        command=command,
        problem=problem,
        source=source,
    )


def badcase_command(file: Path, answer: str) -> str:
    """What makes a badcase of an answer, but for the reason and the check, which only a reader knows.

    >>> badcase_command(Path("runs/x/exam/answers.jsonl"), "it's-7")
    'kedge badcase add runs/x/exam/answers.jsonl \\'it\\'"\\'"\\'s-7\\' --why "…" --check \\'lacks: "…"\\''
    """
    return f'kedge badcase add {shlex.quote(str(file))} {shlex.quote(answer)} --why "…" --check \'lacks: "…"\''
