"""Measures of text against counts made by hand."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from kedge.core.text_measures import MAX_PAIRS, distinct, repetition, self_similarity


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 4], 4, 1 / 5),  # 1234 2341 3412 4123 1234: the last one again
        ([7] * 9, 4, 5 / 6),  # six times 7777
        ([1, 2, 3, 4, 5], 4, 0.0),
        ([5, 5, 5], 4, 0.0),  # too short to have one
        ([], 4, 0.0),
        ([1, 2, 1, 2, 1, 3], 2, 2 / 5),  # 12 21 12 21 13
    ],
)
def test_repetition_counts_what_was_there_before(tokens: list[int], n: int, expected: float) -> None:
    assert repetition(tokens, n) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "n", "expected"),
    [
        ([[1, 2, 3], [1, 2, 3, 4]], 2, 3 / 5),  # 12 23 12 23 34
        ([[1, 2], [3]], 2, 1.0),  # 12, and 3 as it is
        ([[], [], [], []], 2, 1 / 4),  # four times nothing is one thing
        ([[1, 2, 3]], 1, 1.0),
        ([], 2, 1.0),
    ],
)
def test_distinct_counts_over_all_answers_together(answers: list[list[int]], n: int, expected: float) -> None:
    assert distinct(answers, n) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], 2 / 4),  # 12 23 of 12 23 34 35
        ([[1, 2, 1, 2, 1], [1, 2]], 1 / 2),  # sets: 12 21 against 12
        ([[], []], 1.0),
        ([[9], [8]], 0.0),
        ([[1, 2]], 0.0),
        ([], 0.0),
    ],
)
def test_similarity_is_the_mean_jaccard_of_pairs(answers: list[list[int]], expected: float) -> None:
    assert self_similarity(answers) == pytest.approx(expected)


def test_similarity_of_many_answers_is_an_estimate_that_does_not_lean_on_their_order() -> None:
    rng = random.Random(1)
    # Eight answers a prompt, next to each other and alike: a scheme that compares neighbours would be far too high.
    groups = [[rng.randrange(50) for _ in range(30)] for _ in range(20)]
    answers = [[*group[:20], *(rng.randrange(50) for _ in range(10))] for group in groups for _ in range(8)]
    sets = [{tuple(answer[i : i + 2]) for i in range(len(answer) - 1)} for answer in answers]
    exact = [len(a & b) / len(a | b) for a, b in combinations(sets, 2)]
    assert len(exact) > 6 * MAX_PAIRS
    spread = (sum((one - sum(exact) / len(exact)) ** 2 for one in exact) / len(exact)) ** 0.5
    assert abs(self_similarity(answers) - sum(exact) / len(exact)) < 3 * spread / MAX_PAIRS**0.5
    assert self_similarity(answers) == self_similarity(answers)
