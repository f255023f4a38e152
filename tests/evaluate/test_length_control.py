"""A planted length bias is found and taken out, whether there is one model or many."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kedge.evaluate import length_controlled
from kedge.evaluate.length_control import PromptResult, length_controlled_estimates


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def planted(theta: float, phi: float, gap: Callable[[int], float], count: int = 3000) -> list[PromptResult]:
    """Preferences equal to their probability under the model: the likelihood is highest at exactly these numbers."""
    gaps = np.array([gap(i) for i in range(count)])
    inputs = np.tanh(gaps / gaps.std(ddof=1))
    return [(sigmoid(theta + phi * x), 100 + longer, 100) for x, longer in zip(inputs, gaps, strict=True)]


def test_a_judge_that_likes_length_is_corrected() -> None:
    # The model is a little worse (θ = −0.4), but 60 tokens longer on average, and the judge likes length (φ = 2).
    rows = planted(-0.4, 2.0, lambda i: 60 + 50 * math.sin(3 * i))
    assert np.mean([preference for preference, _, _ in rows]) > 0.6
    found = length_controlled_estimates({"ppo": rows})["ppo"]
    assert found.mean == pytest.approx(sigmoid(-0.4), abs=5e-3)  # as far as the prior pulls
    assert found.low < found.mean < found.high
    assert found.prompts == 3000


def test_without_a_bias_the_rate_stays_whatever_the_lengths() -> None:
    rows = planted(0.7, 0.0, lambda i: 30 + 40 * math.cos(5 * i))
    assert length_controlled({"ppo": rows})["ppo"] == pytest.approx(sigmoid(0.7), abs=1e-3)


def drawn(models: int, prompts: int = 400) -> tuple[dict[str, list[PromptResult]], dict[str, float]]:
    """Models of the paper's form, with a slope each around 1.5 and shared difficulties; and their true rates."""
    rng = np.random.default_rng(3)
    difficulty = rng.normal(0, 1.5, prompts)
    results, rates = dict[str, list[PromptResult]](), dict[str, float]()
    for number in range(models):
        theta, phi = rng.normal(-0.5, 0.8), rng.normal(1.5, 0.3)
        longer = rng.normal(rng.normal(0, 150), 100, prompts)
        logit = theta + phi * np.tanh(longer / longer.std(ddof=1)) + difficulty
        won = rng.random(prompts) < 1 / (1 + np.exp(-logit))
        results[f"m{number}"] = [(float(w), 500 + x, 500.0) for w, x in zip(won, longer, strict=True)]
        rates[f"m{number}"] = float((1 / (1 + np.exp(-(theta + difficulty)))).mean())
    return results, rates


def test_many_models_are_nearer_to_the_truth_than_each_by_itself_and_than_raw_rates() -> None:
    results, truth = drawn(24)
    together = length_controlled(results)
    alone = {model: length_controlled({model: rows})[model] for model, rows in results.items()}
    raw = {model: float(np.mean([row[0] for row in rows])) for model, rows in results.items()}

    def error(rates: dict[str, float]) -> float:
        return float(np.mean([abs(rates[model] - truth[model]) for model in truth]))

    assert error(together) < 0.035
    assert error(together) < error(alone) < error(raw)


def test_intervals_hold_the_truth() -> None:
    results, truth = drawn(40)
    estimates = length_controlled_estimates(results)
    held = [estimates[model].low <= truth[model] <= estimates[model].high for model in truth]
    assert np.mean(held) >= 0.8


def test_the_baseline_against_itself_changes_nothing_for_the_others() -> None:
    results, _ = drawn(10)
    before = length_controlled(results)
    after = length_controlled({"itself": [(0.5, 500.0, 500.0)] * 400, **results})
    assert after.pop("itself") == 0.5
    assert after == before


def test_a_model_that_always_wins_and_equal_lengths() -> None:
    assert length_controlled({"ppo": [(1.0, 10.0 + i % 7, 12.0) for i in range(50)]})["ppo"] == 1.0
    even = [(float(i % 4 > 0), 12.0, 12.0) for i in range(4000)]
    assert length_controlled({"ppo": even})["ppo"] == pytest.approx(0.75, abs=1e-3)
    same_gap = [(float(i % 4 > 0), 20.0, 12.0) for i in range(4000)]
    assert length_controlled({"ppo": same_gap})["ppo"] == pytest.approx(0.75, abs=1e-3)
    assert length_controlled({}) == {}


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({"a": [(0.5, 1.0, 1.0)], "b": [(0.5, 1.0, 1.0), (1.0, 1.0, 2.0)]}, "the same prompts"),
        ({"a": [(1.5, 1.0, 1.0)]}, "from 0 to 1"),
        ({"a": [(0.5, math.nan, 1.0)]}, "finite"),
    ],
)
def test_what_cannot_be_read_is_refused(results: dict[str, list[PromptResult]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        length_controlled(results)
