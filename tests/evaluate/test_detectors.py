"""Shares that are corrected for a detector's errors, with intervals that cover."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kedge.evaluate import Detector, corrected_share

SHARP = Detector(name="sharp", found=10_000, positives=10_000, passed=10_000, negatives=10_000)


def test_without_errors_the_share_stays() -> None:
    corrected = corrected_share(0.3, 1000, SHARP)
    assert corrected.share == pytest.approx(0.3)
    assert corrected.high - corrected.low == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 1000), rel=0.1)


@pytest.mark.parametrize(
    ("observed", "counts"), [(0.8, {"found": 45, "positives": 50}), (0.3, {"passed": 40, "negatives": 50})]
)
def test_errors_measured_on_few_cases_widen_the_interval(observed: float, counts: dict[str, int]) -> None:
    large = Detector(name="large", found=4500, positives=5000, passed=4000, negatives=5000)
    few, many = corrected_share(observed, 2000, replace(large, **counts)), corrected_share(observed, 2000, large)
    assert few.share == many.share == pytest.approx((observed + 0.8 - 1) / 0.7)
    assert few.high - few.low > 1.5 * (many.high - many.low)


@pytest.mark.parametrize("truth", [0.05, 0.4])
def test_the_interval_covers(truth: float) -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for seed in range(900):
        found, passed = int(rng.binomial(200, 0.93)), int(rng.binomial(200, 0.9))
        detector = Detector(name="drawn", found=found, positives=200, passed=passed, negatives=200)
        observed = rng.binomial(150, truth * 0.93 + (1 - truth) * 0.1) / 150
        corrected = corrected_share(observed, 150, detector, seed=seed, draws=500)
        hits += corrected.low <= truth <= corrected.high
    assert 0.93 <= hits / 900 <= 0.97


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        corrected_share(1.2, 10, SHARP)
    blind = Detector(name="blind", found=1, positives=2, passed=1, negatives=2)
    with pytest.raises(ValueError, match="no better than chance"):
        corrected_share(0.5, 10, blind)


@pytest.mark.parametrize("observed", [0.0, 1.0])
def test_a_share_of_none_or_all_is_not_certain(observed: float) -> None:
    corrected = corrected_share(observed, 20, SHARP)
    assert corrected.share == observed
    assert corrected.high - corrected.low > 0.08
