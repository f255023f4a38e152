"""What sways a judge besides the answers' worth: their places, their lengths, who wrote them; and how well it knows
when it is right.

Every function takes the judge's replies one by one, both orders of an item apart, so that a verdict which the orders
contradict still shows what swayed it. Shape letters: N replies, B bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from kedge.core.stats import Floats, wilson
from kedge.feedback.alt_test import Choice
from kedge.feedback.clustered import Measured, clustered_share, first_slope, of_sums

BINS = 10
_WINS = {"first": 1.0, "second": 0.0, "tie": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One reply of a judge, and what it was shown."""

    item: int
    prompt: Hashable
    people: tuple[Choice, ...]
    longer: int
    """Characters that the first answer has more than the second."""
    models: tuple[str | None, str | None]
    is_first_a: bool
    """Whether the first answer was shown as A."""
    reply: Choice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Log-odds of an answer for every standard deviation (`sd`, in characters) that it is longer."""

    held: Measured | None
    """Of the judge, people's verdict on the item held fixed (and the place): what length adds to what people see; None
    where people said nothing."""
    alone: Measured | None
    """Of the judge, length (and the place) alone: to lay beside people's own slope."""
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    low: float
    high: float
    count: int
    probability: float
    """The mean that the judge gave to the first answer."""
    share: float
    """How often most people found it the better one."""
    share_low: float
    share_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """P(first) beside people, on items that most of them decided."""

    ece: float
    """The mean distance of probability and share over items, in bins of equal width (Guo et al. 2017)."""
    brier: float
    count: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBias:
    """Answers of the judge's own family against others."""

    held: Measured | None
    """Log-odds of an own answer, people's verdict on the item held fixed (and the place)."""
    judge: Measured
    """How often they win by the judge, ties half."""
    people: Measured
    """How often they win by people. A judge that errs at random is nearer to ½: that alone is no bias."""


def position_bias(shown: Sequence[Shown]) -> Measured | None:
    """P(A) − ½ over replies that decide. In both orders every answer is A once, so that no bias is 0."""
    decided = [reply for reply in shown if reply.reply in ("first", "second")]
    return clustered_share(
        [(reply.reply == "first") == reply.is_first_a for reply in decided],
        [reply.prompt for reply in decided],
        less=0.5,
    )


def longer_wins(shown: Sequence[Shown], *, of_people: bool = False) -> Measured | None:
    """How often the longer answer is chosen, over verdicts that decide between answers of unequal length: those of the
    judge, or those of all people."""
    unequal = [reply for reply in (_once(shown) if of_people else shown) if reply.longer]
    verdicts = [
        (verdict, reply)
        for reply in unequal
        for verdict in (reply.people if of_people else (reply.reply,))
        if verdict in ("first", "second")
    ]
    return clustered_share(
        [(verdict == "first") == (reply.longer > 0) for verdict, reply in verdicts],
        [reply.prompt for _, reply in verdicts],
    )


def length_bias(shown: Sequence[Shown]) -> LengthBias | None:
    """The judge's slopes over length; None where all differences are equal."""
    spread = _spread(shown)
    decided = [reply for reply in shown if reply.reply in ("first", "second")]
    if not spread or not decided:
        return None
    outcome_N = np.array([float(reply.reply == "first") for reply in decided])
    place_N = np.array([_place(reply) for reply in decided])
    length_N = np.array([reply.longer / spread for reply in decided])
    prompts = [reply.prompt for reply in decided]
    held = None
    if all(reply.people for reply in decided):
        people_N = np.array([2 * _preference(reply.people) - 1 for reply in decided])
        held = first_slope(outcome_N, np.stack([length_N, place_N, people_N], axis=1), prompts)
    alone = first_slope(outcome_N, np.stack([length_N, place_N], axis=1), prompts)
    return LengthBias(held=held, alone=alone, sd=spread)


def people_length_slope(shown: Sequence[Shown]) -> Measured | None:
    """The slope over length of people's verdicts that decide, each counted, in the judge's standard deviations."""
    spread = _spread(shown)
    decided = [(verdict, reply) for reply in _once(shown) for verdict in reply.people if verdict in ("first", "second")]
    if not spread or not decided:
        return None
    outcome_N = np.array([float(verdict == "first") for verdict, _ in decided])
    inputs_NK = np.array([[reply.longer / spread, 1.0] for _, reply in decided])
    return first_slope(outcome_N, inputs_NK, [reply.prompt for _, reply in decided])


def family_bias(shown: Sequence[Shown], family: str, *, seed: int = 0) -> FamilyBias | None:
    """From the items of which one answer is by a model of the family and the other is not; None where there is none.

    Replies that cannot be read are left out. A model is of the family where its name contains it, upper and lower case
    alike.
    """
    own = [(reply, _own_sides(reply, family)) for reply in shown if reply.reply is not None]
    mixed = [(reply, 1.0 if first else -1.0) for reply, (first, second) in own if first != second]
    if not mixed:
        return None
    prompts = [reply.prompt for reply, _ in mixed]
    wins_NE = np.array(
        [
            [_towards(side, _WINS[reply.reply]), _towards(side, _preference(reply.people)), 1.0]
            for reply, side in mixed
            if reply.reply is not None
        ]
    )
    rates = [
        of_sums(wins_NE, prompts, lambda sums_DE, at=at: sums_DE[:, at] / sums_DE[:, 2], limits=(0.0, 1.0), seed=seed)
        for at in (0, 1)
    ]
    assert rates[0] is not None
    assert rates[1] is not None
    decided = [(reply, side) for reply, side in mixed if reply.reply != "tie"]
    held = first_slope(
        np.array([float(reply.reply == "first") for reply, _ in decided]),
        np.array([[side, _place(reply), 2 * _preference(reply.people) - 1] for reply, side in decided]).reshape(-1, 3),
        [reply.prompt for reply, _ in decided],
    )
    return FamilyBias(held=held, judge=rates[0], people=rates[1])


def calibration(shown: Sequence[Shown], probabilities: Sequence[float | None]) -> Calibration | None:
    """None where no item that most people decided has a probability."""
    pairs = [
        (probability, outcome)
        for reply, probability in zip(_once(shown), probabilities, strict=True)
        if probability is not None and (outcome := _decided(reply.people)) is not None
    ]
    if not pairs:
        return None
    probability_N, outcome_N = (np.array(column) for column in zip(*pairs, strict=True))
    bin_N = np.minimum((probability_N * BINS).astype(np.int64), BINS - 1)
    gap_B = np.bincount(bin_N, weights=probability_N - outcome_N, minlength=BINS)
    return Calibration(
        ece=float(np.abs(gap_B).sum() / len(pairs)),
        brier=float(np.square(probability_N - outcome_N).mean()),
        count=len(pairs),
        bins=tuple(_bin(place, probability_N[bin_N == place], outcome_N[bin_N == place]) for place in np.unique(bin_N)),
    )


def _own_sides(reply: Shown, family: str) -> tuple[bool, bool]:
    """Whether each answer is of the family; neither where one's model is not known."""
    first, second = reply.models
    if first is None or second is None:
        return False, False
    return family.lower() in first.lower(), family.lower() in second.lower()


def _towards(side: float, preference: float) -> float:
    return preference if side > 0 else 1 - preference


def _place(reply: Shown) -> float:
    return 1.0 if reply.is_first_a else -1.0


def _bin(place: int, probability_N: Floats, outcome_N: Floats) -> Bin:
    low, high = wilson(float(outcome_N.sum()), len(outcome_N))
    return Bin(
        low=int(place) / BINS,
        high=(int(place) + 1) / BINS,
        count=len(outcome_N),
        probability=float(probability_N.mean()),
        share=float(outcome_N.mean()),
        share_low=low,
        share_high=high,
    )


def _decided(people: Sequence[Choice]) -> float | None:
    """1 or 0 where most people, ties counted as a voice of their own, prefer one answer; else None."""
    counts = Counter(people).most_common(2)
    if counts[0][0] == "tie" or (len(counts) > 1 and counts[0][1] == counts[1][1]):
        return None
    return _WINS[counts[0][0]]


def _preference(people: Sequence[Choice]) -> float:
    return fmean(_WINS[verdict] for verdict in people)


def _spread(shown: Iterable[Shown]) -> float:
    return float(np.std([reply.longer for reply in _once(shown)]))


def _once(shown: Iterable[Shown]) -> list[Shown]:
    """One reply an item, for what is of the item and not of the reply."""
    return list({reply.item: reply for reply in shown}.values())
