"""What one person's labels say of that person: care, consistency, sides, speed, drift.

Each function takes what was counted and gives a number with its interval or its probability; who is asked to pause,
and what becomes of the labels, is decided elsewhere. Intervals are 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kedge.core.errors import DataError
from kedge.core.stats import wilson

FEWEST_GOLD = 8
"""Gold questions before anybody is paused for them."""
GOLD_ACCURACY = 0.75
GOLD_CERTAINTY = 0.95
SELF_AGREEMENT = 0.6
"""Below it a person's repeated labels say too little."""
WORDS_A_MINUTE = 1_000
RUN_PROBABILITY = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share, or the distance of one from ½, with its interval by Wilson (1927)."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldCheck:
    """How a person does on questions whose answer is known."""

    accuracy: float
    """The mean of the posterior, Beta(1 + right, 1 + wrong)."""
    below: float
    """The probability that the accuracy is below the threshold."""
    pause: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """The longest run of one side."""

    side: Hashable
    length: int
    probability: float
    """That fair sides give so long a run, of either side, in so many labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A share of late labels less that of early ones."""

    early: float
    late: float
    difference: float
    low: float
    high: float

    @property
    def is_worse(self) -> bool:
        return self.high < 0


def gold_check(
    right: int, seen: int, *, threshold: float = GOLD_ACCURACY, certainty: float = GOLD_CERTAINTY
) -> GoldCheck:
    """The gold rule: pause where P(accuracy < threshold) > certainty, and at least 8 were seen.

    The posterior has whole parameters, so that its share below x is a binomial tail: I_x(r + 1, w + 1) =
    P(Bin(r + w + 1, x) > r).

    >>> check = gold_check(3, 8)
    >>> round(check.accuracy, 4), round(check.below, 4), check.pause
    (0.4, 0.99, True)
    >>> gold_check(0, 7).pause, gold_check(8, 8).pause
    (False, False)
    """
    if not 0 <= right <= seen:
        raise DataError(f"right is between 0 and seen: found {right} of {seen}")
    below = _binomial_above(right, seen + 1, threshold)
    return GoldCheck(accuracy=(right + 1) / (seen + 2), below=below, pause=seen >= FEWEST_GOLD and below > certainty)


def self_agreement(first: Sequence[Hashable], again: Sequence[Hashable]) -> Share:
    """The share of repeated items that got the same label, which names an answer and not a side.

    >>> self_agreement(["a", "b", "tie", "a"], ["a", "a", "tie", "a"]).value
    0.75
    """
    if len(first) != len(again) or not first:
        raise DataError(f"self-agreement needs the same items twice: found {len(first)} labels and {len(again)}")
    return share_of(sum(label == other for label, other in zip(first, again, strict=True)), len(first))


def tie_share(ties: int, labels: int) -> Share:
    """
    >>> tie_share(2, 8).value
    0.25
    """
    return share_of(ties, labels)


def position_bias(left: int, right: int) -> Share:
    """P(left) − ½ over the labels that chose a side. Sides are drawn at random, so that an unbiased person is at 0.

    >>> bias = position_bias(75, 25)
    >>> round(bias.value, 4), round(bias.low, 4), round(bias.high, 4)
    (0.25, 0.157, 0.3245)
    """
    share = share_of(left, left + right)
    return Share(value=share.value - 0.5, low=share.low - 0.5, high=share.high - 0.5, count=share.count)


def longest_side_run(sides: Sequence[Hashable]) -> SideRun:
    """The longest run of one side in the order of the labels (ties left out), and how likely that is by chance.

    >>> longest_side_run(["left", "right", "right", "right"])
    SideRun(side='right', length=3, probability=0.375)
    """
    if not sides:
        raise DataError("no label chose a side, so there is no run of one")
    side, length = max(_runs(sides), key=lambda run: run[1])
    return SideRun(side=side, length=length, probability=run_probability(length, len(sides)))


def run_probability(length: int, labels: int) -> float:
    """That fair coins show a run of `length` or more, of either side, in so many throws.

    A run of n sides is n − 1 times "as before": no such run in t throws has the probability q(t) = q(t − 1) −
    2^(−n) q(t − n), counted in throws after the first.

    >>> run_probability(3, 4), run_probability(1, 4), run_probability(5, 4), run_probability(2, 2)
    (0.375, 1.0, 0.0, 0.5)
    """
    if length <= 1:
        return 1.0
    repeats, throws = length - 1, labels - 1
    none = [1.0] * repeats
    for throw in range(repeats, throws + 1):
        before = none[throw - repeats - 1] if throw > repeats else 1.0
        none.append(none[throw - 1] - before * 2.0 ** -(repeats + (throw > repeats)))
    return 1 - none[throws] if throws >= repeats else 0.0


def words_a_minute(words: int, seconds: float) -> float:
    """How fast somebody would have read all that was shown, idle seconds taken off; ∞ without any time.

    >>> words_a_minute(400, 20), words_a_minute(400, 20) > WORDS_A_MINUTE
    (1200.0, True)
    """
    return 60 * words / seconds if seconds > 0 else math.inf


def drift(outcomes: Sequence[bool], *, late: int) -> Drift:
    """Whether the last `late` labels agree less (with gold, with the others) than those before them.

    The interval of a difference of shares by Newcombe (1998): from Wilson's of both.

    >>> change = drift([True] * 45 + [False] * 5 + [True] * 25 + [False] * 25, late=50)
    >>> change.early, change.late, round(change.low, 4), round(change.high, 4), change.is_worse
    (0.9, 0.5, -0.545, -0.2247, True)
    """
    if not 0 < late < len(outcomes):
        raise DataError(f"drift compares the last {late} labels with those before: found {len(outcomes)} in all")
    first = share_of(sum(outcomes[:-late]), len(outcomes) - late)
    last = share_of(sum(outcomes[-late:]), late)
    difference = last.value - first.value
    return Drift(
        early=first.value,
        late=last.value,
        difference=difference,
        low=difference - math.hypot(last.value - last.low, first.high - first.value),
        high=difference + math.hypot(last.high - last.value, first.value - first.low),
    )


def _runs(sides: Sequence[Hashable]) -> Iterator[tuple[Hashable, int]]:
    return ((side, sum(1 for _ in run)) for side, run in groupby(sides))


def share_of(count: int, total: int) -> Share:
    """A share with its interval.

    >>> share_of(3, 4).value
    0.75
    """
    if not 0 <= count <= total or not total:
        raise DataError(f"a share needs labels, and a count of at most all of them: found {count} of {total}")
    low, high = wilson(count, total)
    return Share(value=count / total, low=low, high=high, count=total)


def _binomial_above(count: int, trials: int, share: float) -> float:
    """P(Bin(trials, share) > count)."""
    if not 0 < share < 1:
        raise DataError(f"a threshold lies between 0 and 1: found {share!r}")
    return min(1.0, math.fsum(_binomial(hits, trials, share) for hits in range(count + 1, trials + 1)))


def _binomial(hits: int, trials: int, share: float) -> float:
    log_ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return math.exp(log_ways + hits * math.log(share) + (trials - hits) * math.log1p(-share))
