"""Paired tests against closed forms, brute force and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.stats import student_quantile
from kedge.evaluate import holm, mcnemar, non_inferiority, rogan_gladen, tango
from kedge.evaluate.paired import _tango_score


@pytest.mark.parametrize(("b", "c", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (1, 9, 0.021484375)])
def test_mcnemar_by_hand(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == mcnemar(c, b) == p


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40), st.floats(-0.9, 0.9))
def test_the_score_of_a_difference_uses_its_likeliest_probabilities(b: int, c: int, rest: int, d: float) -> None:
    """No other probability of c, with that of b the difference above it, is likelier than the one in the score."""
    n = b + c + rest
    if n == 0 or abs(b - c - n * d) < 1e-9:
        return
    variance = ((b - c - n * d) / _tango_score(b, c, n, d)) ** 2 / n
    q = (variance - d * (1 - d)) / 2

    def likelihood(q: float) -> float:
        counts = ((b, q + d), (c, q), (rest, 1 - 2 * q - d))
        return sum(count * math.log(max(p, 1e-300)) for count, p in counts if count)

    lowest, highest = max(0.0, -d), (1 - d) / 2
    for other in np.linspace(lowest, highest, 21):
        assert likelihood(min(max(q, lowest), highest)) >= likelihood(float(other)) - 1e-6


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_tango_is_symmetric_holds_what_was_observed_and_narrows(b: int, c: int, rest: int) -> None:
    n = b + c + rest
    if n == 0:
        return
    low, high = tango(b, c, n)
    assert -1 <= low <= (b - c) / n <= high <= 1
    assert tango(c, b, n) == pytest.approx((-high, -low), abs=1e-9)
    inner = tango(b, c, n, level=0.8)
    assert low <= inner[0] <= inner[1] <= high


def test_tango_where_nothing_differs_has_a_closed_form() -> None:
    z2 = student_quantile(0.975, 10**5) ** 2
    assert tango(0, 0, 30) == pytest.approx((-z2 / (30 + z2), z2 / (30 + z2)), abs=1e-4)


def test_holm_by_hand_and_its_order() -> None:
    assert holm([]) == []
    assert holm([0.5, 0.001, 0.04]) == pytest.approx([0.5, 0.003, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="from 0 to 1"):
        holm([1.2])


@given(st.floats(0, 1), st.floats(0.55, 1), st.floats(0.55, 1))
def test_rogan_gladen_gives_back_what_a_detector_blurred(truth: float, sensitivity: float, specificity: float) -> None:
    observed = truth * sensitivity + (1 - truth) * (1 - specificity)
    assert rogan_gladen(observed, sensitivity, specificity) == pytest.approx(truth, abs=1e-9)


def test_rogan_gladen_stays_a_share_and_refuses_a_coin() -> None:
    assert rogan_gladen(0.05, 0.9, 0.9) == 0.0
    assert rogan_gladen(0.95, 0.9, 0.9) == 1.0
    with pytest.raises(ValueError, match="no better than chance"):
        rogan_gladen(0.5, 0.5, 0.5)


def items(rng: np.random.Generator, count: int, *, discordant: float, loss: float) -> tuple[list[float], list[float]]:
    """Baseline and candidate, right or wrong; `loss` is by how much the candidate is worse."""
    drawn = rng.random(count)
    worse, better = (discordant + loss) / 2, (discordant - loss) / 2
    both = rng.random(count) < 0.5
    baseline = np.where(drawn < worse, True, np.where(drawn < worse + better, False, both))
    candidate = np.where(drawn < worse, False, np.where(drawn < worse + better, True, both))
    return candidate.astype(float).tolist(), baseline.astype(float).tolist()


def test_equal_models_pass_a_large_exam_and_a_planted_loss_fails() -> None:
    rng = np.random.default_rng(0)
    verdicts = [non_inferiority(*items(rng, 14_042, discordant=0.1, loss=0.0), margin=0.01).verdict for _ in range(100)]
    assert verdicts.count("pass") >= 90
    assert verdicts.count("fail") == 0
    worse = non_inferiority(*items(rng, 14_042, discordant=0.1, loss=0.03), margin=0.01)
    assert worse.verdict == "fail"
    assert worse.high < -0.01


def test_few_items_decide_nothing_and_say_how_many_would() -> None:
    found = non_inferiority([1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0], margin=0.02)
    assert found.verdict == "undecided"
    assert found.needed == math.ceil((1.6448536 + 0.8416212) ** 2 * 0.5 / 0.02**2)
    assert found.low < found.difference == 0.0 < found.high


def test_scores_are_compared_by_student_and_clusters_widen_what_they_share() -> None:
    rng = np.random.default_rng(1)
    shared = np.repeat(rng.normal(0, 1, 30), 10)
    candidate, baseline = shared + rng.normal(0, 0.1, 300), rng.normal(0, 0.1, 300)
    alone = non_inferiority(candidate.tolist(), baseline.tolist(), margin=0.5)
    clustered = non_inferiority(
        candidate.tolist(), baseline.tolist(), margin=0.5, clusters=np.repeat(range(30), 10).tolist()
    )
    gap = (candidate - baseline).reshape(30, 10).mean(axis=1)
    reach = student_quantile(0.95, 29) * gap.std(ddof=1) / math.sqrt(30)
    assert (clustered.low, clustered.high) == pytest.approx((gap.mean() - reach, gap.mean() + reach))
    assert clustered.high - clustered.low > 2.5 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"candidate": [1.0], "baseline": []}, "one score an item"),
        ({"candidate": [1.0], "baseline": [1.0], "margin": 0.0}, "margin must be above 0"),
        ({"candidate": [math.nan], "baseline": [1.0]}, "not finite"),
        ({"candidate": [1.0], "baseline": [1.0], "clusters": [1, 2]}, "one cluster an item"),
    ],
)
def test_what_cannot_be_decided_is_refused(given_: dict[str, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        non_inferiority(**{"margin": 0.1, **given_})  # pyright: ignore[reportArgumentType]
