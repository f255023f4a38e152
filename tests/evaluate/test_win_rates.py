"""Wins, ties and losses counted by hand; means over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from kedge.core.stats import wilson
from kedge.evaluate.win_rates import Outcome, estimate, outcome_of, share_interval, win_rate


@pytest.mark.parametrize(
    ("theirs", "base", "tie", "expected"),
    [
        ([2.0], [1.0], 0.0, (1.0, 0.0, 0.0)),
        ([1.0], [2.0], 0.0, (0.0, 0.0, 1.0)),
        ([1.0], [1.25], 0.25, (0.0, 1.0, 0.0)),
        ([1.0], [1.25], 0.2, (0.0, 0.0, 1.0)),
        # 3 > 2, 3 > 1, 1 < 2, 1 = 1
        ([3.0, 1.0], [2.0, 1.0], 0.0, (0.5, 0.25, 0.25)),
        # 5 against 1, 2, 9: two wins, one loss
        ([5.0], [1.0, 2.0, 9.0], 0.0, (2 / 3, 0.0, 1 / 3)),
    ],
)
def test_every_answer_meets_every_other(
    theirs: list[float], base: list[float], tie: float, expected: tuple[float, float, float]
) -> None:
    found = outcome_of(theirs, base, tie=tie)
    assert (found.win, found.tie, found.loss) == pytest.approx(expected)


def test_a_tie_is_half_a_win() -> None:
    outcomes = [Outcome(1, 0, 0), Outcome(1, 0, 0), Outcome(0, 1, 0), Outcome(0, 0, 1), Outcome(0.5, 0.25, 0.25)]
    found = win_rate(outcomes)
    assert found is not None
    assert (found.wins, found.ties, found.losses) == pytest.approx((0.5, 0.25, 0.25))
    assert found.rate == pytest.approx(0.625)
    assert found.prompts == 5
    assert 0.1 < found.low < 0.4
    assert 0.8 < found.high <= 1.0


@pytest.mark.parametrize(("outcome", "low", "high"), [(Outcome(1, 0, 0), 0.7225, 1.0), (Outcome(0, 0, 1), 0.0, 0.2775)])
def test_where_all_prompts_agree_the_interval_still_has_a_width(outcome: Outcome, low: float, high: float) -> None:
    # Wilson with 10 of 10: 1 / (1 + z²/10) = 1 / 1.38415 = 0.72247
    found = win_rate([outcome] * 10)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_nothing_was_compared() -> None:
    assert win_rate([]) is None


def test_a_mean_over_prompts_counts_them_and_repeats_itself() -> None:
    values = [0.0, 1.0, 5.0, 2.5]
    found = estimate(values, seed=3)
    assert found is not None
    assert (found.mean, found.prompts) == (2.125, 4)
    assert found == estimate(values, seed=3)
    assert estimate([], seed=0) is None


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [(20, 1), (20, 4), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((50, 1), (100, 4)))],
)
@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("ties", [0.1, 0.3])
def test_intervals_of_win_rates_cover(prompts: int, answers: int, share: float, ties: float) -> None:
    rng = np.random.default_rng(7)
    propensity = rng.beta(share * 6, (1 - share) * 6, (3000, prompts, 1)) if answers > 1 else share
    won = rng.random((3000, prompts, answers)) < propensity
    rates = np.where(rng.random(won.shape) < ties, 0.5, won).mean(axis=2)
    truth = share * (1 - ties) + ties / 2
    covered = np.mean([low <= truth <= high for low, high in map(share_interval, rates)])
    assert 0.93 <= covered <= 0.975


def test_wins_and_losses_alone_have_wilsons_interval() -> None:
    rates = np.array([1.0] * 8 + [0.0] * 2)
    assert share_interval(rates) == wilson(8, 10)
    assert share_interval(np.ones(10)) == wilson(10, 10)
    assert share_interval(np.full(10, 0.5)) == wilson(5, 10)
