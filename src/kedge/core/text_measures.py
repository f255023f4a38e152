"""How repetitive one answer is, and how alike many answers are, by n-grams of their tokens. Plain Python, no torch.

An answer shorter than n counts as one n-gram, itself: a batch of equal or empty answers reads as collapsed, not varied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

Gram = tuple[int, ...]

MAX_PAIRS = 2048
"""More pairs of answers than these are sampled: Jaccard indices of std 0.2 then give a mean with an error of 0.004."""


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of an answer that repeat an earlier one (seq-rep-n; Welleck et al. 2020).

    The 2-grams of 1 2 1 2 1 are 12, 21, 12, 21: two of four were there before.

    >>> repetition([1, 2, 1, 2, 1], n=2)
    0.5
    """
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    return 1 - len({tuple(tokens[start : start + n]) for start in range(total)}) / total


def distinct(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Distinct n-grams over all n-grams of all answers: distinct-n (Li et al. 2016). 1 without answers.

    >>> distinct([[1, 2, 3], [1, 2, 4]])  # 12, 23, 12, 24
    0.75
    """
    grams = [gram for answer in answers for gram in _grams(answer, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def self_similarity(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Mean over pairs of answers of the Jaccard index of their sets of n-grams; 0 for fewer than two answers.

    Up to `MAX_PAIRS` pairs all of them count; of more, that many are drawn without replacement, always the same ones:
    an unbiased estimate, whatever the order of the answers.

    >>> self_similarity([[1, 2, 3], [1, 2, 4], [1, 2, 3]])  # 1/3, 1 and 1/3
    0.5555555555555555
    """
    sets = [frozenset(_grams(answer, n)) for answer in answers]
    pairs = _pairs(len(sets))
    if not pairs:
        return 0.0
    return sum(len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs) / len(pairs)


def _grams(tokens: Sequence[int], n: int) -> list[Gram]:
    return [tuple(tokens[start : start + n]) for start in range(max(1, len(tokens) - n + 1))]


def _pairs(count: int) -> list[tuple[int, int]]:
    if count * (count - 1) // 2 <= MAX_PAIRS:
        return list(combinations(range(count), 2))
    rng, drawn = random.Random(0), set[tuple[int, int]]()
    while len(drawn) < MAX_PAIRS:
        a, b = sorted(rng.sample(range(count), 2))
        drawn.add((a, b))
    return sorted(drawn)
