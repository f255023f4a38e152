"""How the results of exams have changed since the start of a run, item by item, as metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kedge.evaluate.looks import worse
from kedge.exams.exam import Exam
from kedge.exams.rows import ItemRow
from kedge.exams.summary import difference_interval

Key = tuple[str, str]
"""Exam and metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The mean over the items that both looks have, now minus at the start, with its 95 % interval."""

    difference: float
    low: float
    high: float
    items: int


def exam_metrics(
    exams: Sequence[Exam],
    now: Sequence[ItemRow],
    start: Sequence[ItemRow] = (),
    before: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """`exam/NAME/METRIC` of every metric; with `start`, its `/change` and the `/low` and `/high` of that; of the first
    metric of each exam `/worse`, the p-value of its being no worse than at the start, adjusted for the number of exams,
    and `/worse/twice`, the larger of it and that of the look before, whose metrics are `before`."""
    metrics: dict[str, float] = {}
    own, first = _by_key(now), _by_key(start)
    for exam in exams:
        for place, (metric, about) in enumerate(exam.metrics.items()):
            rows, name = own.get((exam.name, metric), []), f"exam/{exam.name}/{metric}"
            if not rows:
                continue
            metrics[name] = float(np.mean([row.score for row in rows]))
            pairs = _pairs(first.get((exam.name, metric), []), rows)
            if not pairs:
                continue
            change = change_of(pairs)
            metrics |= {
                f"{name}/change": change.difference,
                f"{name}/change/low": change.low,
                f"{name}/change/high": change.high,
            }
            if place == 0:
                p = worse_by(pairs, about.better, comparisons=len(exams))
                metrics |= {f"{name}/worse": p, f"{name}/worse/twice": max(p, (before or {}).get(f"{name}/worse", 1.0))}
    return metrics


def change_of(pairs: Sequence[tuple[ItemRow, ItemRow]]) -> Change:
    """Of pairs (at the start, now) of the same items."""
    start_N, now_N = (np.array([row.score for row in rows]) for rows in zip(*pairs, strict=True))
    low, high = difference_interval(start_N, now_N, [now.cluster for _, now in pairs])
    return Change(difference=float((now_N - start_N).mean()), low=low, high=high, items=len(pairs))


def worse_by(pairs: Sequence[tuple[ItemRow, ItemRow]], better: Literal["more", "less"], *, comparisons: int) -> float:
    """The adjusted p-value of a metric being no worse than at the start, whichever way is better."""
    start, now = [row.score for row, _ in pairs], [row.score for _, row in pairs]
    good, bad = (start, now) if better == "more" else (now, start)
    return worse(good, bad, clusters=_clusters(pairs), comparisons=comparisons)


def _clusters(pairs: Sequence[tuple[ItemRow, ItemRow]]) -> list[str] | None:
    names = [now.cluster for _, now in pairs]
    return names if len(set(names)) < len(names) else None


def _pairs(start: Sequence[ItemRow], now: Sequence[ItemRow]) -> list[tuple[ItemRow, ItemRow]]:
    """The rows of the items that both have: a metric may not apply to an item that was answered otherwise."""
    first = {row.item: row for row in start}
    return [(first[row.item], row) for row in now if row.item in first]


def _by_key(rows: Sequence[ItemRow]) -> dict[Key, list[ItemRow]]:
    parts: dict[Key, list[ItemRow]] = {}
    for row in rows:
        parts.setdefault((row.exam, row.metric), []).append(row)
    return parts
