"""What exams say of the models of a board: columns of numbers that were measured alike, and paired differences."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kedge.commands.board.models import Known, Models
from kedge.commands.board.places import Place
from kedge.core.errors import DataError
from kedge.core.files import hash_json
from kedge.evaluate import mcnemar, non_inferiority, superiority
from kedge.exams.rows import ItemRow, read_rows
from kedge.exams.summary import Result, summarise
from kedge.gate.evidence import EXAM, ITEMS, Item, refuse_lost
from kedge.gate.exam_rules import Pairs
from kedge.report.board.records import Cell, Column, Difference, GroupRow, GroupTable

TOPICS: Mapping[str, str] = {
    **dict.fromkeys(("mmlu", "piqa", "gsm8k", "code", "knowledge", "common_sense", "arithmetic"), "capability"),
    **dict.fromkeys(("ifeval", "instructions"), "instructions"),
    **dict.fromkeys(("truthfulqa", "sycophancy"), "truth"),
    **dict.fromkeys(("xstest", "harmbench", "advbench", "safety"), "safety"),
    "bbq": "bias",
    "diversity": "style",
    "reward_pairs": "reward models",
}
OWN = "own exams"
ORDER = ("preference", "capability", "instructions", "truth", "safety", "bias", "style", "reward models", OWN)
"""Topics from left to right."""

Key = tuple[str, str]
"""An exam as it was asked, and a metric of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sat:
    """One model's rows of one metric, and where they are from."""

    rows: tuple[ItemRow, ...]
    folder: Path
    name: str
    """What the folder calls the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamColumn:
    key: Key
    exam: str
    column: Column
    sat: Mapping[Known, Sat]
    results: Mapping[Known, Sequence[Result]]
    """Over all items first, then by group."""
    is_exams_main: bool
    """Whether the exam's own name means this metric in a rule."""


def read_exam(place: Place) -> tuple[dict[str, Any], list[ItemRow]]:
    """`exam.json` and its items; what is broken is an error that names the file."""
    file = place.folder / EXAM
    try:
        about: dict[str, Any] = json.loads(file.read_bytes())
        names, exams = list(map(str, about["models"])), about["exams"]
        for exam in exams.values():
            for metric in exam["metrics"].values():
                _ = metric["better"], metric["summary"]
            _ = exam["items_hash"], exam["main"], exam["title"], dict(exam["settings"])
        results = list(about.get("results", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: not the results of an exam ({type(error).__name__}: {error}); run the exam again"
        ) from error
    if not (place.folder / ITEMS).is_file():
        raise DataError(f"{place.folder / ITEMS}: not there; run the exam again")
    rows = list(read_rows(place.folder / ITEMS))
    _refuse_rows(rows, place.folder / ITEMS)
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.exam not in exams or row.metric not in exams[row.exam]["metrics"] or row.model not in names:
            raise DataError(
                f"{place.folder / ITEMS}: a row of {row.exam}.{row.metric} by {row.model}, which {EXAM} beside it does "
                "not have; run the exam again"
            )
        key = (row.exam, row.metric, row.model)
        counts[key] = counts.get(key, 0) + 1
    refuse_lost(results, counts, place.folder / ITEMS)
    return about, rows


def _refuse_rows(rows: Sequence[ItemRow], file: Path) -> None:
    """Scores that are no numbers, and items that occur twice."""
    known: set[tuple[str, str, str, str]] = set()
    for row in rows:
        key = (row.exam, row.metric, row.model, row.item)
        is_number = isinstance(row.score, int | float) and math.isfinite(row.score)
        if not is_number or key in known:
            what = "stands there twice" if is_number else f"has the score {row.score}"
            raise DataError(f"{file}: item {row.item} of {row.exam}.{row.metric} by {row.model} {what}; run it again")
        known.add(key)


def exam_columns(
    read: Sequence[tuple[Place, dict[str, Any], list[ItemRow]]], models: Models, named: set[str]
) -> tuple[list[ExamColumn], list[str]]:
    """A column for each metric, apart where an exam was asked otherwise, in the order of topics; and what to say of it.

    `named` are metrics that rules name: they stand beside the main ones.
    """
    facts: dict[Key, tuple[str, dict[str, Any]]] = {}
    sat: dict[Key, dict[Known, Sat]] = {}
    notes: list[str] = []
    for place, about, rows in read:
        parts: dict[tuple[str, str, str], list[ItemRow]] = {}
        for row in rows:
            parts.setdefault((row.exam, row.metric, row.model), []).append(row)
        for (exam, metric, name), own in parts.items():
            key = (_identity(exam, about["exams"][exam]), metric)
            facts.setdefault(key, (exam, about["exams"][exam]))
            model = models.asked(place, name)
            earlier = sat.setdefault(key, {}).get(model)
            if earlier and _scores(earlier.rows) != _scores(own):
                notes.append(
                    f"{name} took {exam} twice with other scores ({metric}): {place.folder} counts, {earlier.folder} "
                    "does not"
                )
            sat[key][model] = Sat(rows=tuple(own), folder=place.folder, name=name)
    columns = [_column(key, *facts[key], sat[key], named) for key in sat]
    columns.sort(key=lambda column: ORDER.index(column.column.topic))
    return _told_apart(columns, notes), notes


def _scores(rows: Sequence[ItemRow]) -> dict[str, float]:
    return {row.item: row.score for row in rows}


def _identity(exam: str, facts: Mapping[str, Any]) -> str:
    settings = {name: value for name, value in facts["settings"].items() if name != "seed"}
    return hash_json([exam, facts["items_hash"], settings])


def _column(key: Key, exam: str, facts: Mapping[str, Any], sat: Mapping[Known, Sat], named: set[str]) -> ExamColumn:
    metric = key[1]
    about = facts["metrics"][metric]
    is_main = facts["main"] == metric
    scores = [row.score for own in sat.values() for row in own.rows]
    column = Column(
        title=exam,
        metric=metric,
        topic=TOPICS.get(exam, OWN),
        better=about["better"],
        summary=about["summary"],
        items_hash=str(facts["items_hash"]),
        is_share=all(0 <= score <= 1 for score in scores),
        is_main=is_main or f"{exam}.{metric}" in named,
    )
    results = {model: summarise(own.rows) for model, own in sat.items()}
    return ExamColumn(key=key, exam=exam, column=column, sat=dict(sat), results=results, is_exams_main=is_main)


def _told_apart(columns: Sequence[ExamColumn], notes: list[str]) -> list[ExamColumn]:
    """Exams of one name that were asked otherwise carry a part of the hash of their items, and it is said."""
    asked: dict[str, list[str]] = {}
    for column in columns:
        ways = asked.setdefault(column.exam, [])
        if column.key[0] not in ways:
            ways.append(column.key[0])
    for exam, ways in asked.items():
        if len(ways) > 1:
            notes.append(
                f"{exam} was asked in {len(ways)} ways (other items or other settings): each has a column of its own, "
                "and models that answered other items are not compared"
            )
    return [
        replace(column, column=replace(column.column, title=f"{column.exam} ({column.key[0][:4]})"))
        if len(asked[column.exam]) > 1
        else column
        for column in columns
    ]


def cell_of(column: ExamColumn, model: Known, baseline: Known | None) -> Cell | None:
    if model not in column.results:
        return None
    result = column.results[model][0]
    difference = paired(column, model, baseline) if baseline and model is not baseline else None
    note = ""
    if difference is None and model is not baseline:
        label = baseline.label if baseline else "the baseline"
        note = f"not compared: {label} has not answered these items"
    return Cell(
        value=result.mean, low=result.low, high=result.high, items=result.items, difference=difference, note=note
    )


def pairs_of(column: ExamColumn, model: Known, baseline: Known) -> Pairs | None:
    """The items that both have answered; None where there are none."""
    if model not in column.sat or baseline not in column.sat:
        return None
    own, other = ({row.item: _item(row) for row in column.sat[key].rows} for key in (model, baseline))
    both = tuple((item, other[name]) for name, item in own.items() if name in other)
    left_out = len(own.keys() ^ other.keys())
    return Pairs(items=both, is_less_better=column.column.better == "less", left_out=left_out) if both else None


def _item(row: ItemRow) -> Item:
    return Item(score=row.score, cluster=row.cluster, groups=row.groups)


def paired(column: ExamColumn, model: Known, baseline: Known) -> Difference | None:
    pairs = pairs_of(column, model, baseline)
    return difference_of(pairs) if pairs else None


def difference_of(pairs: Pairs) -> Difference:
    """Items of 0 and 1 that stand alone: McNemar's exact test and Tango's interval; others Student's with clusters."""
    own, other = pairs.scores()
    clusters = pairs.clusters()
    bounds = non_inferiority(own, other, margin=1.0, alpha=0.025, clusters=clusters)
    is_binary = clusters is None and all(score in (0.0, 1.0) for score in (*own, *other))
    if is_binary:
        gained = sum(ours > theirs for ours, theirs in zip(own, other, strict=True))
        lost = sum(ours < theirs for ours, theirs in zip(own, other, strict=True))
        p_value = mcnemar(gained, lost)
    else:
        above = superiority(own, other, clusters=clusters)
        p_value = min(1.0, 2 * min(above, 1 - above))
    widest = 1.0 if all(0 <= score <= 1 for score in (*own, *other)) else math.inf
    return Difference(
        value=bounds.difference,
        low=max(-widest, bounds.low),
        high=min(widest, bounds.high),
        p_value=p_value,
        items=len(own),
        left_out=pairs.left_out,
    )


def group_tables(
    columns: Sequence[ExamColumn], models: Sequence[Known], baseline: Known | None
) -> Iterator[GroupTable]:
    """For each main column and field of its items, a row a value."""
    for column in columns:
        if not column.column.is_main:
            continue
        by_field: dict[str, dict[str, dict[Known, Result]]] = {}
        for model, results in column.results.items():
            for result in results[1:]:
                ((name, value),) = cast("Mapping[str, str]", result.group).items()
                by_field.setdefault(name, {}).setdefault(value, {})[model] = result
        for name, values in by_field.items():
            parts = {model: _pairs_by(column, model, baseline, name) for model in models}
            rows = tuple(
                GroupRow(
                    value=value,
                    cells=tuple(_group_cell(own.get(model), parts[model].get(value)) for model in models),
                )
                for value, own in sorted(values.items())
            )
            yield GroupTable(column=column.column, field=name, rows=rows)


def _pairs_by(column: ExamColumn, model: Known, baseline: Known | None, name: str) -> dict[str, Pairs]:
    pairs = pairs_of(column, model, baseline) if baseline and model is not baseline else None
    if pairs is None:
        return {}
    with_field = [pair for pair in pairs.items if name in pair[0].groups]
    return replace(pairs, items=tuple(with_field)).by(name)


def _group_cell(result: Result | None, pairs: Pairs | None) -> Cell | None:
    if result is None:
        return None
    return Cell(
        value=result.mean,
        low=result.low,
        high=result.high,
        items=result.items,
        difference=difference_of(pairs) if pairs and pairs.independent > 1 else None,
    )
