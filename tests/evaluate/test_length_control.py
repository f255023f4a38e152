"""A planted length bias is found and taken out; the fit is where the likelihood says."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kedge.core.stats import logistic_fit
from kedge.evaluate.win_rates import PRIOR_PRECISION, AnswerComparison, length_controlled


def planted(theta: float, phi: float, gap: Callable[[int], float], count: int = 3000) -> list[AnswerComparison]:
    """Outcomes equal to their probability under the model: the likelihood is highest at exactly these numbers."""
    gaps = [gap(i) for i in range(count)]
    mean = sum(gaps) / count
    spread = math.sqrt(sum((length - mean) ** 2 for length in gaps) / count)
    return [
        AnswerComparison(
            prompt=i,
            outcome=1 / (1 + math.exp(-theta - phi * math.tanh(length / spread))),
            longer=length,
            weight=1.0,
        )
        for i, length in enumerate(gaps)
    ]


def test_a_judge_that_likes_length_is_corrected() -> None:
    # The model is a little worse (θ = −0.4), but 60 tokens longer on average, and the judge likes length (φ = 2).
    items = planted(-0.4, 2.0, lambda i: 60 + 50 * math.sin(3 * i))
    found = length_controlled(items, seed=4, draws=40)
    assert found is not None
    assert sum(item.outcome for item in items) / len(items) > 0.6
    assert found.mean == pytest.approx(1 / (1 + math.exp(0.4)), rel=1e-3)
    assert found.low < found.mean < found.high
    assert found.prompts == 3000


def test_without_a_bias_the_rate_stays_whatever_the_lengths() -> None:
    items = planted(0.7, 0.0, lambda i: 30 + 40 * math.cos(5 * i))
    found = length_controlled(items, seed=4, draws=5)
    assert found is not None
    assert found.mean == pytest.approx(1 / (1 + math.exp(-0.7)), rel=1e-3)


def test_the_fit_is_where_no_neighbour_is_likelier() -> None:
    rng = np.random.default_rng(0)
    length_N = np.tanh(rng.normal(0.5, 1.0, 300))
    outcome_N = (rng.random(300) < 1 / (1 + np.exp(-(0.3 - 1.2 * length_N)))).astype(float)
    weight_N = rng.random(300)

    def likelihood(theta: float, phi: float) -> float:
        p_N = 1 / (1 + np.exp(-(theta + phi * length_N)))
        per_N = outcome_N * np.log(p_N) + (1 - outcome_N) * np.log(1 - p_N)
        return float((weight_N * per_N).sum() - 0.005 * (theta**2 + phi**2))

    inputs_N2 = np.stack([np.ones(300), length_N], axis=1)
    theta, phi = logistic_fit(outcome_N, inputs_N2, weight_N, precision=PRIOR_PRECISION).tolist()
    best = likelihood(theta, phi)
    for step in (1e-4, -1e-4):
        assert likelihood(theta + step, phi) < best
        assert likelihood(theta, phi + step) < best
    assert phi < -0.5  # the sign of the bias that was planted


def test_a_model_that_always_wins_has_a_finite_fit_near_one() -> None:
    items = [AnswerComparison(prompt=i, outcome=1.0, longer=float(i % 7 - 3), weight=1.0) for i in range(200)]
    found = length_controlled(items, seed=0, draws=20)
    assert found is not None
    assert 0.999 < found.mean < 1.0


def test_equal_lengths_leave_the_rate_alone_and_one_length_gap_says_nothing() -> None:
    won = [AnswerComparison(prompt=i, outcome=float(i % 4 > 0), longer=0.0, weight=1.0) for i in range(4000)]
    found = length_controlled(won, seed=0, draws=5)
    assert found is not None
    assert found.mean == pytest.approx(0.75, rel=1e-3)
    always = [AnswerComparison(prompt=i, outcome=float(i % 4 > 0), longer=8.0, weight=1.0) for i in range(40)]
    assert length_controlled(always, seed=0) is None
    assert length_controlled([], seed=0) is None


def test_a_prompt_with_many_answers_counts_once() -> None:
    """Prompt 0 is lost in 9 comparisons of weight 1/9, the three others are won in one: 3 of 4, not 3 of 12."""
    lost = [AnswerComparison(prompt=0, outcome=0.0, longer=0.0, weight=1 / 9)] * 9
    won = [AnswerComparison(prompt=i, outcome=1.0, longer=0.0, weight=1.0) for i in (1, 2, 3)]
    found = length_controlled(lost + won, seed=0, draws=200)
    assert found is not None
    assert found.mean == pytest.approx(0.75, abs=3e-3)  # the prior pulls by 0.01 · θ, of 4 prompts
    assert found.prompts == 4
    assert found.high > 0.95  # prompt 0 is drawn or not, with all of its comparisons
