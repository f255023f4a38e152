"""The bootstrap against every sample there is, and against the normal interval it must approach."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean, pstdev

import numpy as np
import pytest

from kedge.evaluate.intervals import estimate, resamples


def test_the_interval_is_that_of_all_possible_samples() -> None:
    values = [0.0, 1.0, 5.0, 2.5]
    means = sorted(fmean(sample) for sample in product(values, repeat=4))
    found = estimate(values, seed=3, draws=200_000)
    assert found is not None
    assert found.mean == pytest.approx(2.125)
    assert found.prompts == 4
    # 256 equally likely samples: the quantiles of so few numbers are steps, and draws must hit the same ones.
    assert found.low == pytest.approx(float(np.quantile(means, 0.025)), abs=1e-9)
    assert found.high == pytest.approx(float(np.quantile(means, 0.975)), abs=1e-9)


def test_with_many_prompts_it_is_the_normal_interval() -> None:
    values = [math.sin(7 * i) + 0.3 * (i % 5) for i in range(1000)]
    found = estimate(values, seed=1, draws=20_000)
    assert found is not None
    half = 1.959964 * pstdev(values) / math.sqrt(len(values))
    # 20,000 draws know the ends of an interval to about 1 % of its half.
    assert found.high - found.low == pytest.approx(2 * half, abs=0.04 * half)
    assert (found.high + found.low) / 2 == pytest.approx(found.mean, abs=0.04 * half)


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    values = [1.0, 4.0, 2.0, 8.0, 5.0, 7.0]
    assert estimate(values, seed=5) == estimate(values, seed=5)
    assert estimate(values, seed=5, draws=50) != estimate(values, seed=6, draws=50)


def test_there_is_no_mean_without_prompts() -> None:
    assert estimate([], seed=0) is None


def test_draws_come_in_parts_that_are_no_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(resamples(4, seed=9, draws=10)))
    monkeypatch.setattr("kedge.evaluate.intervals._NUMBERS_AT_ONCE", 12)
    parts = list(resamples(4, seed=9, draws=10))
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert set(whole.flatten().tolist()) == {0, 1, 2, 3}
