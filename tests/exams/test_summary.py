"""Means with intervals, by group, with clusters that make them wider."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kedge.evaluate.detectors import Detector
from kedge.evaluate.win_rates import share_interval
from kedge.exams.exam import Metric
from kedge.exams.rows import ItemRow
from kedge.exams.summary import interval, summarise


def rows(scores: Sequence[float], *, clusters: Sequence[str] | None = None, language: str = "") -> list[ItemRow]:
    return [
        ItemRow(
            exam="e",
            metric="m",
            item=str(number),
            cluster=clusters[number] if clusters else str(number),
            model="a",
            score=score,
            answer="",
            seed=0,
            groups={"language": language or ("de" if number % 2 else "en")},
        )
        for number, score in enumerate(scores)
    ]


def test_a_row_for_all_and_one_for_each_group() -> None:
    results = summarise(rows([1, 0, 1, 0]))
    assert [(result.group, result.mean, result.items) for result in results] == [
        (None, 0.5, 4),
        ({"language": "de"}, 0.0, 2),
        ({"language": "en"}, 1.0, 2),
    ]


def test_a_group_that_all_items_have_says_nothing_new() -> None:
    assert len(summarise(rows([1, 0, 1, 0], language="en"))) == 1


def test_items_alone_have_the_interval_of_shares() -> None:
    scores = np.array([1.0, 0.0, 1.0, 1.0, 0.5])
    assert interval(scores, list("abcde")) == share_interval(scores)


def test_clusters_of_equal_items_are_no_more_than_one_item_each() -> None:
    alone = interval(np.array([1.0, 0.0] * 10), [str(number) for number in range(20)])
    doubled = interval(np.repeat([1.0, 0.0] * 10, 5), [str(number // 5) for number in range(100)])
    as_if_apart = interval(np.repeat([1.0, 0.0] * 10, 5), [str(number) for number in range(100)])
    assert doubled[1] - doubled[0] == pytest.approx(alone[1] - alone[0], rel=0.1)
    assert doubled[1] - doubled[0] > 1.8 * (as_if_apart[1] - as_if_apart[0])


def test_clusters_that_are_all_right_are_not_certain() -> None:
    low, high = interval(np.ones(50), [str(number // 10) for number in range(50)])
    assert low < 0.6
    assert high == pytest.approx(1.0)


def test_numbers_outside_of_0_to_1_have_an_interval_around_their_mean() -> None:
    low, high = interval(np.array([-1.0, 1.0, 1.0, 1.0]), list("abcd"))
    assert (low + high) / 2 == pytest.approx(0.5)


def test_the_calibration_is_that_of_the_rows_with_confidences() -> None:
    (result, *_) = summarise(rows([1, 0]), {("e", "m", "a"): [0.9, 0.9]})
    assert result.ece == pytest.approx(0.4)


DETECTOR = Detector(name="refusal", found=90, positives=100, passed=80, negatives=100)


def test_a_share_that_a_detector_counted_is_corrected_for_its_errors() -> None:
    scores = [1.0] * 60 + [0.0] * 140
    detected = Metric(better="less", summary="", detector=DETECTOR)
    (result, *groups) = summarise(rows(scores), metrics={("e", "m"): detected})
    assert result.mean == pytest.approx(0.3)
    assert result.corrected is not None
    assert result.corrected.share == pytest.approx((0.3 - 0.2) / 0.7)
    assert result.corrected.low < 0.06 < 0.23 < result.corrected.high
    assert all(group.corrected is not None for group in groups)
    (plain, *_) = summarise(rows(scores), metrics={("e", "m"): Metric(better="less", summary="")})
    assert plain.corrected is None


def test_what_the_detector_does_not_find_is_the_rest_of_what_it_should() -> None:
    scores = [1.0] * 30 + [0.0] * 170
    metric = Metric(better="less", summary="", detector=DETECTOR, counts_detected=False)
    (result, *_) = summarise(rows(scores), metrics={("e", "m"): metric})
    assert result.corrected is not None
    assert result.corrected.share == pytest.approx(1 - (0.85 - 0.2) / 0.7)
    assert result.corrected.low <= result.corrected.share <= result.corrected.high


def test_items_of_a_cluster_do_not_narrow_what_is_corrected() -> None:
    metric = {("e", "m"): Metric(better="less", summary="", detector=DETECTOR)}
    scores = np.repeat([1.0, 0.0] * 10, 10).tolist()
    (apart, *_) = summarise(rows(scores), metrics=metric)
    (together, *_) = summarise(rows(scores, clusters=[str(number // 10) for number in range(200)]), metrics=metric)
    assert apart.corrected is not None
    assert together.corrected is not None
    assert together.corrected.high - together.corrected.low > 1.5 * (apart.corrected.high - apart.corrected.low)


def test_fewer_cases_than_errors_alone_would_give_are_no_certainty() -> None:
    metric = {("e", "m"): Metric(better="less", summary="", detector=DETECTOR)}
    (result, *_) = summarise(rows([0.0] * 40), metrics=metric)
    assert result.corrected is not None
    assert (result.corrected.share, result.corrected.high) == (0.0, result.high)
    assert result.high > 0.08
