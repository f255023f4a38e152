"""From rows of items to means with intervals, over all items and by group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.core.stats import Floats, clustered_variance, student_quantile, wilson
from kedge.evaluate.detectors import CorrectedShare, corrected_share
from kedge.evaluate.paired import tango
from kedge.evaluate.win_rates import share_interval
from kedge.exams.choice import expected_calibration_error
from kedge.exams.exam import Metric
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
    corrected: CorrectedShare | None = None
    """The mean as it would be without the errors of what detected the cases, where their number is known."""


def summarise(
    rows: Iterable[ItemRow],
    confidences: Mapping[Key, Sequence[float]] | None = None,
    *,
    metrics: Mapping[tuple[str, str], Metric] | None = None,
    by_group: bool = True,
) -> list[Result]:
    """A result for each exam, metric and model, followed by those of its groups, in the order of the rows.

    `confidences` has one probability for each row of a metric, in the order of its rows. `metrics`, by exam and name,
    say which shares a detector has counted.
    """
    parts: dict[Key, list[ItemRow]] = {}
    for row in rows:
        parts.setdefault((row.exam, row.metric, row.model), []).append(row)
    results: list[Result] = []
    for key, own in parts.items():
        confidence = (confidences or {}).get(key)
        ece = expected_calibration_error(confidence, [row.score for row in own]) if confidence else None
        metric = (metrics or {}).get(key[:2])
        results.append(_result(key, own, None, ece, metric))
        if by_group:
            results += [_result(key, members, group, None, metric) for group, members in _groups(own)]
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


def _result(
    key: Key, rows: Sequence[ItemRow], group: Mapping[str, str] | None, ece: float | None, about: Metric | None
) -> Result:
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
        corrected=_corrected(about, score_N, clusters, (low, high)) if about else None,
    )


def _corrected(
    metric: Metric, score_N: Floats, clusters: Sequence[str], counted: tuple[float, float]
) -> CorrectedShare | None:
    """The share without its detector's errors; of what is not detected, from the share that is.

    Where fewer cases are found than the detector's errors alone would give, it errs less here than where it was
    measured: nothing is known better then than by counting, and the interval reaches as far as the one of the count.
    """
    if metric.detector is None:
        return None
    mean, count = float(score_N.mean()), _independent(score_N, clusters)
    found = corrected_share(mean if metric.counts_detected else 1 - mean, count, metric.detector)
    if not metric.counts_detected:
        found = CorrectedShare(share=1 - found.share, low=1 - found.high, high=1 - found.low)
    if 0 < found.share < 1:
        return found
    return CorrectedShare(share=found.share, low=min(found.low, counted[0]), high=max(found.high, counted[1]))


def _independent(score_N: Floats, clusters: Sequence[str]) -> float:
    """How many items of 0 and 1 would vary like these clusters of them."""
    if len(set(clusters)) == len(clusters):
        return float(len(clusters))
    variance, groups = clustered_variance(score_N, clusters)
    mean = float(score_N.mean())
    return max(1.0, min(len(score_N), mean * (1 - mean) / variance)) if 0 < variance < math.inf else float(groups)


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
    groups = len(set(clusters))
    if not is_share or groups < 2:
        return (0.0, 1.0) if is_share else mean_interval(score_N, clusters)
    mean, effective = float(score_N.mean()), _independent(score_N, clusters)
    return wilson(mean * effective, effective, z=student_quantile(0.975, groups - 1))


def difference_interval(before_N: Floats, after_N: Floats, clusters: Sequence[str]) -> tuple[float, float]:
    """95 % of the mean of after − before on the same items: Tango's where all scores are 0 or 1 and items stand alone,
    so that items without any difference do not seem to leave no doubt; else Student's with the variance of clusters.

    >>> low, high = difference_interval(np.ones(20), np.ones(20), [str(number) for number in range(20)])
    >>> round(low, 3), round(high, 3)
    (-0.161, 0.161)
    """
    gap_N = after_N - before_N
    is_binary = bool(np.isin(before_N, (0, 1)).all() and np.isin(after_N, (0, 1)).all())
    if is_binary and len(set(clusters)) == len(clusters):
        return tango(int((gap_N > 0).sum()), int((gap_N < 0).sum()), len(gap_N))
    return mean_interval(gap_N, clusters)


def mean_interval(score_N: Floats, clusters: Sequence[str]) -> tuple[float, float]:
    """95 % of the mean of any numbers: Student's, with the variance of clusters (Miller 2024); without two clusters
    nothing is known, which is told as the whole range from −1 to 1 of a difference."""
    variance, groups = clustered_variance(score_N, clusters)
    if groups < 2:
        return -1.0, 1.0
    reach = student_quantile(0.975, groups - 1) * math.sqrt(variance)
    return float(score_N.mean()) - reach, float(score_N.mean()) + reach
