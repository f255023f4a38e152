"""How repetitive one answer is, and how alike many answers are, by n-grams of their tokens. Plain Python, no torch.

An answer shorter than n counts as one n-gram, itself: a batch of equal or empty answers reads as collapsed, not varied.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import combinations

Gram = int | tuple[int, ...]

_BEYOND = 2**32
"""More than any token."""

MAX_PAIRS = 2048
"""More pairs of answers than these are sampled: Jaccard indices of std 0.2 then give a mean with an error of 0.004."""


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of an answer that repeat an earlier one (seq-rep-n; Welleck et al. 2020).

    The 2-grams of 1 2 1 2 1 are 12, 21, 12, 21: two of four were there before.

    >>> repetition([1, 2, 1, 2, 1], n=2)
    0.5
    """
    total = len(tokens) - n + 1
    return 1 - len(set(_grams(tokens, n))) / total if total >= 1 else 0.0


def distinct(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Distinct n-grams over all n-grams of all answers: distinct-n (Li et al. 2016). 1 without answers.

    >>> distinct([[1, 2, 3], [1, 2, 4]])  # 12, 23, 12, 24
    0.75
    """
    each = [_grams(answer, n) for answer in answers]
    total = sum(map(len, each))
    return len(set[Gram]().union(*each)) / total if total else 1.0


def self_similarity(answers: Sequence[Sequence[int]], n: int = 2) -> float:
    """Mean over pairs of answers of the Jaccard index of their sets of n-grams; 0 for fewer than two answers.

    Up to `MAX_PAIRS` pairs all of them count; of more, that many are drawn without replacement, always the same ones:
    an unbiased estimate, whatever the order of the answers.

    >>> self_similarity([[1, 2, 3], [1, 2, 4], [1, 2, 3]])  # 1/3, 1 and 1/3
    0.5555555555555555
    """
    sets = [set(_grams(answer, n)) for answer in answers]
    pairs = _pairs(len(sets))
    if not pairs:
        return 0.0
    counts = Counter(gram for grams in sets for gram in grams)
    common = [{gram for gram in grams if counts[gram] > 1} for grams in sets]  # two answers can share nothing else
    shared = [len(common[a] & common[b]) for a, b in pairs]
    joint = [len(sets[a]) + len(sets[b]) - both for (a, b), both in zip(pairs, shared, strict=True)]
    return sum(both / either for both, either in zip(shared, joint, strict=True)) / len(pairs)


def _grams(tokens: Sequence[int], n: int) -> Sequence[Gram]:
    """As numbers, since a tuple for each would keep the garbage collector busy for longer than all the rest takes."""
    if len(tokens) < n:
        return [tuple(tokens)]
    grams = tokens
    for start in range(1, n):
        grams = [gram * _BEYOND + token for gram, token in zip(grams, tokens[start:], strict=False)]
    return grams


@cache
def _pairs(count: int) -> list[tuple[int, int]]:
    if count * (count - 1) // 2 <= MAX_PAIRS:
        return list(combinations(range(count), 2))
    rng, drawn = random.Random(0), set[tuple[int, int]]()
    while len(drawn) < MAX_PAIRS:
        a, b = sorted(rng.sample(range(count), 2))
        drawn.add((a, b))
    return sorted(drawn)
