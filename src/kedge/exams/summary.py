"""From rows of items to means with intervals, over all items and by group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.core.stats import Floats, student_quantile, wilson
from kedge.evaluate.paired import clustered_variance
from kedge.evaluate.win_rates import share_interval
from kedge.exams.choice import expected_calibration_error
from kedge.exams.rows import ItemRow

Key = tuple[str, str, str]
"""Exam, metric and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The mean of a metric over items, with its 95 % interval; `group` names the part of the items that it is about."""

    exam: str
    metric: str
    model: str
    mean: float
    low: float
    high: float
    items: int
    clusters: int
    group: Mapping[str, str] | None = None
    ece: float | None = None
    """Expected calibration error, where the answers are choices with probabilities."""


def summarise(
    rows: Iterable[ItemRow], confidences: Mapping[Key, Sequence[float]] | None = None, *, by_group: bool = True
) -> list[Result]:
    """A result for each exam, metric and model, followed by those of its groups, in the order of the rows.

    `confidences` has one probability for each row of a metric, in the order of its rows.
    """
    parts: dict[Key, list[ItemRow]] = {}
    for row in rows:
        parts.setdefault((row.exam, row.metric, row.model), []).append(row)
    results: list[Result] = []
    for key, own in parts.items():
        confidence = (confidences or {}).get(key)
        ece = expected_calibration_error(confidence, [row.score for row in own]) if confidence else None
        results.append(_result(key, own, None, ece))
        if by_group:
            results += [_result(key, members, group, None) for group, members in _groups(own)]
    return results


def _groups(rows: Sequence[ItemRow]) -> Iterator[tuple[dict[str, str], list[ItemRow]]]:
    """The rows of each value of each field; a field that has one value for all says nothing new."""
    for field in dict.fromkeys(name for row in rows for name in row.groups):
        values: dict[str, list[ItemRow]] = {}
        for row in rows:
            if field in row.groups:
                values.setdefault(row.groups[field], []).append(row)
        if len(values) > 1:
            yield from (({field: value}, members) for value, members in sorted(values.items()))


def _result(key: Key, rows: Sequence[ItemRow], group: Mapping[str, str] | None, ece: float | None) -> Result:
    score_N = np.array([row.score for row in rows], dtype=np.float64)
    clusters = [row.cluster for row in rows]
    mean, (low, high) = float(score_N.mean()), interval(score_N, clusters)
    exam, metric, model = key
    return Result(
        exam=exam,
        metric=metric,
        model=model,
        mean=mean,
        low=min(low, mean),  # at 0 and 1 the bounds are the mean but for rounding
        high=max(high, mean),
        items=len(rows),
        clusters=len(set(clusters)),
        group=group,
        ece=ece,
    )


def interval(score_N: Floats, clusters: Sequence[str]) -> tuple[float, float]:
    """95 % of the mean. Shares have Wilson's interval, with as many items as would vary like these clusters of them;
    other numbers have Student's with the variance of clusters (Miller 2024).

    >>> low, high = interval(np.array([1.0, 0.0, 1.0, 1.0]), ["a", "b", "c", "d"])
    >>> round(low, 3), round(high, 3)
    (0.301, 0.954)
    """
    is_share = bool(((score_N >= 0) & (score_N <= 1)).all())
    if is_share and len(set(clusters)) == len(clusters):
        return share_interval(score_N)
    variance, groups = clustered_variance(score_N, clusters)
    if not is_share or groups < 2:
        return (0.0, 1.0) if is_share else mean_interval(score_N, clusters)
    mean = float(score_N.mean())
    effective = min(len(score_N), mean * (1 - mean) / variance) if variance else groups
    return wilson(mean * effective, effective, z=student_quantile(0.975, groups - 1))


def mean_interval(score_N: Floats, clusters: Sequence[str]) -> tuple[float, float]:
    """95 % of the mean of any numbers: Student's, with the variance of clusters (Miller 2024); without two clusters
    nothing is known, which is told as the whole range from −1 to 1 of a difference."""
    variance, groups = clustered_variance(score_N, clusters)
    if groups < 2:
        return -1.0, 1.0
    reach = student_quantile(0.975, groups - 1) * math.sqrt(variance)
    return float(score_N.mean()) - reach, float(score_N.mean()) + reach
