"""Dawid and Skene: the likelihood by enumeration, its maximum, planted people, mirrored sides, limits and refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.core.errors import DataError
from kedge.core.stats import Floats
from kedge.feedback import DawidSkene, dawid_skene
from kedge.feedback.ratings import Ratings

SKILLS = (0.95, 0.85, 0.75, 0.6, 0.5)


def people(seed: int, *, items: int = 600, classes: int = 2, missing: float = 0.2) -> tuple[list[int], Any]:
    """Truths and labels of people who are right with SKILLS and else say any other class."""
    rng = np.random.default_rng(seed)
    truths = rng.integers(classes, size=items).tolist()
    ratings = [
        [
            None
            if rng.random() < missing
            else truth
            if rng.random() < skill
            else int((truth + rng.integers(1, classes)) % classes)
            for skill in SKILLS
        ]
        for truth in truths
    ]
    return truths, ratings


def log_likelihood(ratings: Ratings, priors: Floats, confusion: Floats) -> float:
    """As it is written down: a sum over items of the logarithm of a sum over truths."""
    total = 0.0
    for row in ratings:
        given_labels = [(person, int(label)) for person, label in enumerate(row) if label is not None]
        if given_labels:
            total += math.log(
                sum(
                    priors[k] * math.prod(confusion[person, k, label] for person, label in given_labels)
                    for k in range(len(priors))
                )
            )
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("classes", [2, 3])
def test_log_likelihood_and_posterior_are_those_of_the_parameters(smoothing: float, classes: int) -> None:
    _, ratings = people(0, items=60, classes=classes)
    result = dawid_skene(ratings, classes=classes, smoothing=smoothing)
    assert result.log_likelihood == pytest.approx(log_likelihood(ratings, result.priors, result.confusion), rel=1e-9)
    for row, posterior in zip(ratings, result.posterior, strict=True):
        weights = [
            result.priors[k]
            * math.prod(result.confusion[person, k, label] for person, label in enumerate(row) if label is not None)
            for k in range(classes)
        ]
        assert posterior == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-9)
    assert result.confusion.sum(axis=2) == pytest.approx(np.ones((5, classes)))
    expected = [sum(result.priors[k] * result.confusion[j, k, k] for k in range(classes)) for j in range(5)]
    assert result.accuracy == pytest.approx(expected)


def test_without_smoothing_no_step_from_the_result_is_more_likely() -> None:
    """A maximum: moving any probability a little, with its row still summing to 1, loses likelihood."""
    _, ratings = people(1, items=150)
    result = dawid_skene(ratings, classes=2, smoothing=0)
    for person, truth, step in itertools.product(range(5), range(2), (-1e-3, 1e-3)):
        moved = result.confusion.copy()
        moved[person, truth] += (step, -step)
        if (moved >= 0).all():
            assert log_likelihood(ratings, result.priors, moved) < result.log_likelihood
    assert log_likelihood(ratings, result.priors + np.array([1e-3, -1e-3]), result.confusion) < result.log_likelihood


def test_planted_people_are_found() -> None:
    truths, ratings = people(2, items=3_000, missing=0)
    result = dawid_skene(ratings, classes=2)
    assert result.accuracy == pytest.approx(SKILLS, abs=0.04)
    right = np.mean([label == truth for label, truth in zip(result.labels, truths, strict=True)])
    votes = np.mean([(sum(row) > 2) == truth for row, truth in zip(ratings, truths, strict=True)])
    assert right > votes
    certainty_N = result.posterior.max(axis=1)
    assert certainty_N.mean() == pytest.approx(right, abs=0.02)  # what it is sure of, it may be


def test_one_who_always_says_left_has_no_weight() -> None:
    _, ratings = people(3, items=400, missing=0)
    with_left = [[*row, 0] for row in ratings]
    result, without = dawid_skene(with_left, classes=2), dawid_skene(ratings, classes=2)
    assert result.confusion[5, 0, 0] == pytest.approx(result.confusion[5, 1, 0], abs=1e-3)
    assert result.posterior == pytest.approx(without.posterior, abs=1e-3)


def test_mirrored_people_err_alike_on_both_sides() -> None:
    _, ratings = people(4)
    result = dawid_skene(ratings, classes=2, mirrored=True)
    assert result.confusion[:, 0, 0] == pytest.approx(result.confusion[:, 1, 1])
    assert result.confusion[:, 0, 1] == pytest.approx(result.confusion[:, 1, 0])
    swapped = dawid_skene(
        [[None if label is None else 1 - label for label in row] for row in ratings], classes=2, mirrored=True
    )
    assert swapped.posterior == pytest.approx(result.posterior[:, ::-1], abs=1e-7)
    assert result.log_likelihood < dawid_skene(ratings, classes=2).log_likelihood


@pytest.mark.parametrize(("mirror", "tie"), [(True, 1), ((0, 2, 1), 0)])
def test_mirrored_with_ties(mirror: Any, tie: int) -> None:
    """A tie is its own mirror, wherever it stands among the classes."""
    _, ratings = people(5, classes=3)
    result = dawid_skene(ratings, classes=3, mirrored=mirror)
    left, right = (side for side in range(3) if side != tie)
    for a, b in ((left, right), (right, left)):
        assert result.confusion[:, a, a] == pytest.approx(result.confusion[:, b, b])
        assert result.confusion[:, a, b] == pytest.approx(result.confusion[:, b, a])
        assert result.confusion[:, tie, a] == pytest.approx(result.confusion[:, tie, b])
        assert result.confusion[:, a, tie] == pytest.approx(result.confusion[:, b, tie])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(5)))
def test_the_order_of_people_and_items_does_not_matter(seed: int, order: list[int]) -> None:
    _, ratings = people(seed, items=30)
    turned = [[row[person] for person in order] for row in reversed(ratings)]
    result, other = dawid_skene(ratings, classes=2), dawid_skene(turned, classes=2)
    assert other.log_likelihood == pytest.approx(result.log_likelihood, rel=1e-6)
    assert other.posterior[::-1] == pytest.approx(result.posterior, abs=1e-5)


LIMITS: dict[str, tuple[Any, Any]] = {
    "one class only": ([[1, 1], [1, 1]], lambda r: (r.labels == [1, 1], r.priors[1] == 1, r.log_likelihood == 0)),
    "one person": ([[0], [1], [1]], lambda r: (r.labels == [0, 1, 1], r.accuracy[0] == 1)),
    "an item without labels": ([[0, 0], [1, 1], [None, None]], lambda r: (r.posterior[2].tolist() == [0.5, 0.5],)),
    "a person without labels": ([[0, None], [1, None]], lambda r: (r.accuracy[1] == 0.5, r.accuracy[0] == 1)),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits_without_smoothing(case: str) -> None:
    ratings, holds = LIMITS[case]
    result: DawidSkene = dawid_skene(ratings, classes=2, smoothing=0)
    assert np.isfinite(result.posterior).all()
    assert np.isfinite(result.confusion).all()
    assert all(holds(result))


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "all missing": ([[None, None]], {}, "hold no label"),
    "a class too many": ([[0, 2]], {}, r"from 0 to 1 \(classes: 2\): found 2"),
    "half a class": ([[0, 0.5]], {}, r"found 0\.5"),
    "below zero": ([[0, -1]], {}, "found -1"),
    "one class": ([[0, 0]], {"classes": 1}, "at least 2: found 1"),
    "smoothing below zero": ([[0, 1]], {"smoothing": -0.1}, r"at least 0: found -0\.1"),
    "smoothing nan": ([[0, 1]], {"smoothing": math.nan}, "found nan"),
    "no mirror": ([[0, 1]], {"classes": 3, "mirrored": (1, 2, 0)}, r"found \[1, 2, 0\]"),
    "a short mirror": ([[0, 1]], {"classes": 3, "mirrored": (1, 0)}, r"found \[1, 0\]"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str) -> None:
    ratings, options, message = CASES[case]
    with pytest.raises(DataError, match=message):
        dawid_skene(ratings, **{"classes": 2, **options})
