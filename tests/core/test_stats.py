"""Intervals against published values and against every sample there is; logistic fits against worked-out slopes."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean, pstdev

import numpy as np
import pytest

from kedge.core.stats import bootstrap_mean, bootstrap_rows, logistic_fit, logistic_slope, student_interval, wilson


def test_wilson_matches_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(0, 20)[0] == pytest.approx(0.0, abs=1e-12)


def test_the_interval_is_that_of_all_possible_samples() -> None:
    values = [0.0, 1.0, 5.0, 2.5]
    means = sorted(fmean(sample) for sample in product(values, repeat=4))
    low, high = bootstrap_mean(np.array(values), seed=3, draws=200_000)
    # 256 equally likely samples: the quantiles of so few numbers are steps, and draws must hit the same ones.
    assert low == pytest.approx(float(np.quantile(means, 0.025)), abs=1e-9)
    assert high == pytest.approx(float(np.quantile(means, 0.975)), abs=1e-9)


def test_with_many_values_it_is_the_normal_interval() -> None:
    values = [math.sin(7 * i) + 0.3 * (i % 5) for i in range(1000)]
    low, high = bootstrap_mean(np.array(values), seed=1, draws=20_000)
    half = 1.959964 * pstdev(values) / math.sqrt(len(values))
    # 20,000 draws know the ends of an interval to about 1 % of its half.
    assert high - low == pytest.approx(2 * half, abs=0.04 * half)
    assert (high + low) / 2 == pytest.approx(fmean(values), abs=0.04 * half)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0, 7.0])
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)
    assert bootstrap_mean(values, seed=5, draws=50) != bootstrap_mean(values, seed=6, draws=50)


def test_groups_of_one_are_plain_values_to_the_last_bit() -> None:
    values = np.random.default_rng(0).normal(size=37)
    assert bootstrap_mean(values, seed=4) == bootstrap_mean(values, size_G=np.ones(37), seed=4)


def test_a_mean_of_groups_weighs_them_by_their_size() -> None:
    # One group of a single 1 and one of three 0: drawn twice they give 1, 1/4 (not 1/2) or 0.
    drawn = bootstrap_mean(np.array([1.0, 0.0]), size_G=np.array([1.0, 3.0]), seed=0)
    assert drawn == (0.0, 1.0)


def test_draws_come_in_parts_that_are_no_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {count: np.concatenate(list(bootstrap_rows(count, seed=9, draws=10))) for count in (3, 4)}
    monkeypatch.setattr("kedge.core.stats._NUMBERS_AT_ONCE", 12)
    parts = list(bootstrap_rows(4, seed=9, draws=10))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert np.concatenate(parts).tolist() == whole[4].tolist()
    assert set(whole[4].flatten().tolist()) == {0, 1, 2, 3}
    monkeypatch.setattr("kedge.core.stats._NUMBERS_AT_ONCE", 3)  # an odd number of draws at a time
    assert np.concatenate(list(bootstrap_rows(3, seed=9, draws=10))).tolist() == whole[3].tolist()


def test_both_logistic_fits_find_the_same_slope() -> None:
    inputs = [2.0, -1.0, 0.5, 3.0, -0.25, 1.5, -2.0]
    slope = logistic_slope(inputs)
    wrong = [1 / (1 + math.exp(slope * x)) for x in inputs]
    assert sum(p * x for p, x in zip(wrong, inputs, strict=True)) == pytest.approx(0.0, abs=1e-9)
    fitted = logistic_fit(np.ones(7), np.array(inputs)[:, None], np.ones(7), precision=1e-12)
    assert fitted.tolist() == pytest.approx([slope], rel=1e-8)


def test_the_interval_of_a_few_seeds_is_student_s() -> None:
    """Three of them: mean ± 4.303 s/√3."""
    half = 4.302653 * 0.1 / 3**0.5
    assert student_interval([0.1, 0.2, 0.3]) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert student_interval([0.5]) == (0.5, -math.inf, math.inf)
