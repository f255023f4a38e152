"""Several people's labels into one: majority votes, with the share that agrees as certainty. Pure, whole numbers in.

A vote is a step from −3 (the first answer is much better) to 3 (the second is); 0 is a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

_MOST_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """`better` is the place of the better answer, None for a tie. `certainty` is the share of votes for it, a tie
    counting half; `margin` the mean step towards it over 3, so that |3|, |2|, |1| are 1, 2/3, 1/3."""

    better: int | None
    certainty: float
    margin: float
    consistent: bool


def settle_steps(steps: Sequence[int]) -> Settled:
    """
    >>> settle_steps([-2])
    Settled(better=0, certainty=1.0, margin=0.6666666666666666, consistent=True)
    >>> settle_steps([3, 1, -1])
    Settled(better=1, certainty=0.6666666666666666, margin=0.3333333333333333, consistent=False)
    >>> settle_steps([0]).better is None
    True
    """
    first, second = sum(step < 0 for step in steps), sum(step > 0 for step in steps)
    is_consistent = len({(step > 0) - (step < 0) for step in steps}) <= 1
    if first == second:
        return Settled(better=None, certainty=0.5, margin=0.0, consistent=is_consistent)
    better = 0 if first > second else 1
    towards = sum(steps) if better else -sum(steps)
    ties = len(steps) - first - second
    return Settled(
        better=better,
        certainty=(2 * max(first, second) + ties) / (2 * len(steps)),
        margin=max(0, towards) / (_MOST_STEP * len(steps)),
        consistent=is_consistent,
    )


def settle_ranks(rankings: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One ranking of several, by the mean place (Borda); equal means are ties.

    >>> settle_ranks([[1, 2, 3], [2, 1, 3]])
    (1, 1, 3)
    """
    # Places count the answers before one: 1=3 4 and 1=2 3 are the same ranking.
    totals = [sum(_place(ranking, answer) for ranking in rankings) for answer in range(len(rankings[0]))]
    return tuple(1 + sum(other < total for other in totals) for total in totals)


def _place(ranking: Sequence[int], answer: int) -> int:
    """Twice the number of better answers, plus that of equal ones: ties share their places."""
    return sum(2 * (rank < ranking[answer]) + (rank == ranking[answer]) for rank in ranking)


def settle_pairs(rankings: Sequence[Sequence[int]]) -> list[tuple[int, int, Settled]]:
    """Every two answers of rankings, with what people think of them; the numbers of both, and the vote."""
    return [
        (first, second, settle_steps([_sign(ranking[first] - ranking[second]) for ranking in rankings]))
        for first, second in combinations(range(len(rankings[0])), 2)
    ]


def _sign(difference: int) -> int:
    return (difference > 0) - (difference < 0)
