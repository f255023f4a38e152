"""Strengths from pairs: closed forms, the score equations, ties, clusters, and what has no ranking."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kedge.evaluate import bradley_terry
from kedge.evaluate.ranking import Match

TRUE = {"a": 0.8, "b": 0.2, "c": -0.3, "d": -0.7}


def drawn(count: int, *, nu: float = 0.0, seed: int = 0) -> list[Match]:
    rng = np.random.default_rng(seed)
    matches: list[Match] = []
    for _ in range(count):
        first, second = rng.permutation(list(TRUE))[:2]
        p, q = math.exp(TRUE[first]), math.exp(TRUE[second])
        tie = nu * math.sqrt(p * q)
        draw = rng.random() * (p + q + tie)
        matches.append((str(first), str(second), 1.0 if draw < p else 0.0 if draw < p + q else 0.5))
    return matches


def test_two_models_have_a_closed_form() -> None:
    fitted = bradley_terry([("a", "b", 1.0)] * 6 + [("b", "a", 1.0)] * 2)
    assert fitted.strengths == pytest.approx({"a": math.log(3) / 2, "b": -math.log(3) / 2})
    # The variance of a log-odds is 1/wins + 1/losses; each strength is half of it.
    assert fitted.standard_errors["a"] == pytest.approx(math.sqrt(1 / 6 + 1 / 2) / 2)
    assert fitted.nu is None
    assert fitted.elo("a") - fitted.elo("b") == pytest.approx(400 * math.log10(3))


def test_davidson_of_two_equal_models_has_a_closed_form() -> None:
    matches: list[Match] = [("a", "b", 1.0)] * 3 + [("a", "b", 0.0)] * 3 + [("a", "b", 0.5)] * 4
    fitted = bradley_terry(matches, ties="davidson")
    assert fitted.strengths == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-9)
    assert fitted.nu == pytest.approx(2 * 4 / 6)  # P(tie) = ν / (2 + ν)


@pytest.mark.parametrize("ties", ["half", "davidson"])
def test_each_model_wins_as_often_as_its_strength_says(ties: str) -> None:
    """At the maximum, observed and expected wins (and ½ ties) of every model are equal."""
    matches = drawn(500, nu=0.6)
    fitted = bradley_terry(matches, ties=ties)  # pyright: ignore[reportArgumentType]
    nu = fitted.nu or 0.0
    gaps = dict.fromkeys(TRUE, 0.0)
    for first, second, outcome in matches:
        p, q = (math.exp(fitted.strengths[name]) for name in (first, second))
        tie = nu * math.sqrt(p * q)
        expected = (p + tie / 2) / (p + q + tie)
        gaps[first] += outcome - expected
        gaps[second] -= outcome - expected
    assert gaps == pytest.approx(dict.fromkeys(TRUE, 0.0), abs=1e-6)
    assert sum(fitted.strengths.values()) == pytest.approx(0.0, abs=1e-9)
    assert list(fitted.strengths) == sorted(fitted.strengths, key=lambda name: -fitted.strengths[name])


def test_many_matches_give_the_truth_back_within_their_errors() -> None:
    fitted = bradley_terry(drawn(4000, nu=0.5), ties="davidson")
    for name, truth in TRUE.items():
        assert abs(fitted.strengths[name] - truth) < 4 * fitted.standard_errors[name] < 0.2
    assert fitted.nu == pytest.approx(0.5, abs=0.08)


def test_standard_errors_are_the_spread_over_repetitions() -> None:
    fits = [bradley_terry(drawn(300, seed=seed)) for seed in range(60)]
    spread = float(np.std([fit.strengths["a"] for fit in fits]))
    assert np.mean([fit.standard_errors["a"] for fit in fits]) == pytest.approx(spread, rel=0.3)


def test_copies_of_a_match_in_one_cluster_are_one_observation() -> None:
    matches = drawn(300)
    single = bradley_terry(matches, clusters=range(300))
    copied = bradley_terry([match for match in matches for _ in range(3)], clusters=np.repeat(range(300), 3).tolist())
    assert copied.strengths == pytest.approx(single.strengths, abs=1e-9)
    assert copied.standard_errors == pytest.approx(single.standard_errors, rel=1e-6)
    naive = bradley_terry([match for match in matches for _ in range(3)])
    assert copied.standard_errors["a"] > 1.5 * naive.standard_errors["a"]


def test_without_ties_davidson_is_bradley_terry() -> None:
    matches = drawn(200)
    fitted = bradley_terry(matches, ties="davidson")
    assert fitted.strengths == pytest.approx(bradley_terry(matches).strengths)
    assert fitted.nu == 0.0


@pytest.mark.parametrize(
    ("matches", "words"),
    [
        ([("a", "b", 1.0), ("b", "a", 1.0), ("c", "d", 0.5)], "c, d never met a, b"),
        ([("a", "b", 1.0), ("a", "b", 1.0)], "b never won or tied against a"),
        ([("a", "a", 1.0)], "with itself"),
        ([("a", "b", 0.7)], "1, 0.5 or 0"),
        ([], "two models"),
    ],
)
def test_what_has_no_ranking_is_refused(matches: list[Match], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bradley_terry(matches)
