"""Several people's labels into one: by majority, by votes that weigh by gold, or by Dawid and Skene's posterior.

A vote is a step from −3 (the first answer is much better) to 3 (the second is); 0 is a tie, and so is "both are bad".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

SettleKind = Literal["majority", "dawid_skene", "weighted"]
SETTLES: tuple[SettleKind, ...] = get_args(SettleKind)
FIRST, TIE, SECOND, BOTH_BAD = range(4)
"""The classes of a comparison; those of its other side are `MIRROR`."""
MIRROR = (SECOND, TIE, FIRST, BOTH_BAD)
_MOST_STEP = 3
_DIGITS = 6
"""Of a posterior: its last bits may be another machine's, and an export has the same bytes everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """`better` is the place of the better answer, None for a tie. `certainty` is the share of votes for it, or its
    posterior, a tie counting half; `margin` the mean step towards it over 3, so that |3|, |2|, |1| are 1, 2/3, 1/3."""

    better: int | None
    certainty: float
    margin: float
    consistent: bool


def settle_steps(steps: Sequence[int], weights: Sequence[float] | None = None) -> Settled:
    """By votes; with `weights` each counts so much, and where they are all 0, as if there were none.

    >>> settle_steps([-2])
    Settled(better=0, certainty=1.0, margin=0.6666666666666666, consistent=True)
    >>> settle_steps([3, 1, -1])
    Settled(better=1, certainty=0.6666666666666666, margin=0.3333333333333333, consistent=False)
    >>> settle_steps([0]).better is None
    True
    >>> settle_steps([1, 1, -2], [0.5, 0.5, 3.0])
    Settled(better=0, certainty=0.75, margin=0.4166666666666667, consistent=False)
    """
    if weights is None or not any(weights):
        weights = [1.0] * len(steps)
    total = sum(weights)
    first = sum(weight for step, weight in zip(steps, weights, strict=True) if step < 0)
    second = sum(weight for step, weight in zip(steps, weights, strict=True) if step > 0)
    if first == second:
        return _tie(steps)
    better = 0 if first > second else 1
    towards = sum(step * weight for step, weight in zip(steps, weights, strict=True))
    return Settled(
        better=better,
        certainty=(total + abs(first - second)) / (2 * total),
        margin=max(0.0, towards if better else -towards) / (_MOST_STEP * total),
        consistent=_is_consistent(steps),
    )


def settle_posterior(posterior: Sequence[float], steps: Sequence[int]) -> Settled | None:
    """By the probabilities of the four classes; None where both answers are most probably bad.

    >>> settle_posterior((0.7, 0.2, 0.1, 0.0), [-3, 0])
    Settled(better=0, certainty=0.8, margin=0.5, consistent=False)
    >>> settle_posterior((0.2, 0.1, 0.1, 0.6), [-1]) is None
    True
    """
    best = max(posterior)
    if posterior[BOTH_BAD] == best:
        return None
    if posterior[TIE] == best or posterior[FIRST] == posterior[SECOND]:
        return _tie(steps)
    better = 0 if posterior[FIRST] > posterior[SECOND] else 1
    rest = posterior[TIE] + posterior[BOTH_BAD]
    towards = sum(steps) if better else -sum(steps)
    return Settled(
        better=better,
        certainty=round(max(posterior[FIRST], posterior[SECOND]) + rest / 2, _DIGITS),
        margin=max(0, towards) / (_MOST_STEP * len(steps)),
        consistent=_is_consistent(steps),
    )


def class_of(step: int, *, both_bad: bool = False) -> int:
    """
    >>> class_of(-2), class_of(0), class_of(1), class_of(0, both_bad=True)
    (0, 1, 2, 3)
    """
    return BOTH_BAD if both_bad else 1 + sign(step)


def sign(difference: int) -> int:
    return (difference > 0) - (difference < 0)


def _tie(steps: Sequence[int]) -> Settled:
    return Settled(better=None, certainty=0.5, margin=0.0, consistent=_is_consistent(steps))


def _is_consistent(steps: Sequence[int]) -> bool:
    return len({sign(step) for step in steps}) <= 1


def settle_ranks(rankings: Sequence[Sequence[int]], weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """One ranking of several, by the mean place (Borda); equal means are ties.

    >>> settle_ranks([[1, 2, 3], [2, 1, 3]])
    (1, 1, 3)
    """
    if weights is None or not any(weights):
        weights = [1.0] * len(rankings)
    # Places count the answers before one: 1=3 4 and 1=2 3 are the same ranking.
    totals = [
        sum(weight * _place(ranking, answer) for ranking, weight in zip(rankings, weights, strict=True))
        for answer in range(len(rankings[0]))
    ]
    return tuple(1 + sum(other < total for other in totals) for total in totals)


def _place(ranking: Sequence[int], answer: int) -> int:
    """Twice the number of better answers, plus that of equal ones: ties share their places."""
    return sum(2 * (rank < ranking[answer]) + (rank == ranking[answer]) for rank in ranking)


def ranked_pairs(rankings: Sequence[Sequence[int]]) -> list[tuple[int, int, list[int]]]:
    """Every two answers of rankings with the votes on them: the places of both, and a step of 1, 0 or −1 a person.

    >>> ranked_pairs([[1, 2], [2, 1]])
    [(0, 1, [-1, 1])]
    """
    return [
        (first, second, [sign(ranking[first] - ranking[second]) for ranking in rankings])
        for first, second in combinations(range(len(rankings[0])), 2)
    ]
