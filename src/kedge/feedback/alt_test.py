"""May a judge stand in for a person? The alternative annotator test of Calderon, Reichart and Dror (2025).

One person at a time is left out. On each of that person's items it is asked who agrees more with the other people who
labelled it, the judge or the person left out; W^f is 1 where the judge does or both do alike, W^h likewise for the
person. The judge may replace that person where ρ^f > ρ^h − ε: Student's one-sided test of the differences W^h − W^f
against ε, or Wilcoxon's signed ranks where the person has fewer than 30 items. ω is the share of people that it may
replace, after the correction of Benjamini and Yekutieli (2001) for several people; a judge with ω ≥ 0.5 passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import ranks, student_cdf

Choice = Literal["first", "second", "tie"]
EPSILON = 0.2
"""What a judge may be worse by and still be worth it; the authors' value where the people are experts."""
FDR = 0.05
_FEWEST_FOR_STUDENT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One person left out."""

    person: str
    items: int
    """Of this person that somebody else labelled too."""
    judge: float
    """ρ^f: how often the judge agrees with the others as much as this person does, or more."""
    human: float
    """ρ^h: how often this person does."""
    p_value: float
    test: Literal["student", "wilcoxon"]
    is_replaced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AltTest:
    omega: float
    advantage: float
    """ρ: the mean of ρ^f over people."""
    epsilon: float
    people: tuple[Replacement, ...]


def alt_test(
    people: Sequence[Mapping[str, Choice]],
    judge: Sequence[Choice | None],
    *,
    epsilon: float = EPSILON,
    fdr: float = FDR,
) -> AltTest | None:
    """From each item's verdicts by person, and the judge's, None where it gave none that can be read: that is wrong.

    None where no item has verdicts of two people.

    >>> people = [{"x": "first", "y": "first"}] * 40 + [{"x": "first", "y": "second"}] * 10
    >>> found = alt_test(people, ["first"] * 50)
    >>> found.omega, [(own.judge, own.human) for own in found.people]
    (1.0, [(1.0, 1.0), (1.0, 0.8)])
    """
    if len(people) != len(judge):
        raise DataError(f"the alt-test needs one verdict of the judge an item: found {len(judge)} for {len(people)}")
    names = sorted({person for verdicts in people if len(verdicts) > 1 for person in verdicts})
    if not names:
        return None
    pairs = [_indicators(name, people, judge) for name in names]
    tests = [_p_value([human - own for own, human in pair], epsilon) for pair in pairs]
    rejected = benjamini_yekutieli([p_value for p_value, _ in tests], fdr)
    left_out = tuple(
        Replacement(
            person=name,
            items=len(pair),
            judge=fmean(own for own, _ in pair),
            human=fmean(human for _, human in pair),
            p_value=p_value,
            test=test,
            is_replaced=is_rejected,
        )
        for name, pair, (p_value, test), is_rejected in zip(names, pairs, tests, rejected, strict=True)
    )
    return AltTest(
        omega=fmean(own.is_replaced for own in left_out),
        advantage=fmean(own.judge for own in left_out),
        epsilon=epsilon,
        people=left_out,
    )


def benjamini_yekutieli(p_values: Sequence[float], fdr: float) -> list[bool]:
    """Which hypotheses are rejected so that at most a share `fdr` of them wrongly are, whatever their dependence.

    >>> benjamini_yekutieli([0.02, 0.001, 0.9], 0.05)  # thresholds 0.0091, 0.0182, 0.0273
    [False, True, False]
    """
    count = len(p_values)
    harmonic = math.fsum(1 / place for place in range(1, count + 1))
    order = sorted(range(count), key=p_values.__getitem__)
    last = max(
        (place for place, index in enumerate(order, 1) if p_values[index] <= place * fdr / (count * harmonic)),
        default=0,
    )
    rejected = set(order[:last])
    return [index in rejected for index in range(count)]


def student_below(values: Sequence[float], bound: float) -> float:
    """The one-sided p-value of a mean being no less than `bound`, by Student's t.

    >>> round(student_below([0.0, 0.0, 1.0, -1.0], 0.5), 4)
    0.154
    """
    mean, spread = fmean(values), stdev(values)
    if spread == 0:
        return 0.0 if mean < bound else 1.0
    return student_cdf((mean - bound) / (spread / math.sqrt(len(values))), len(values) - 1)


def wilcoxon_below(values: Sequence[float], bound: float) -> float:
    """The same by signed ranks (Wilcoxon 1945), exact also where ranks are tied: how often signs that fall like fair
    coins leave as small a sum of the ranks above the bound, or a smaller one. Values on the bound are left out.

    >>> wilcoxon_below([0.0] * 4, 0.5), wilcoxon_below([1.0, 1.0], 0.5)
    (0.0625, 1.0)
    """
    gaps = [value - bound for value in values if value != bound]
    if not gaps:
        return 1.0
    # Tied ranks are halves: twice the rank is whole.
    doubled = [round(2 * rank) for rank in ranks(np.abs(np.round(gaps, 12))).tolist()]
    observed = sum(rank for rank, gap in zip(doubled, gaps, strict=True) if gap > 0)
    ways = [1] + [0] * sum(doubled)
    for rank in doubled:
        ways = [count + (ways[total - rank] if total >= rank else 0) for total, count in enumerate(ways)]
    return sum(ways[: observed + 1]) / 2 ** len(doubled)


def _p_value(differences: Sequence[float], epsilon: float) -> tuple[float, Literal["student", "wilcoxon"]]:
    if len(differences) < _FEWEST_FOR_STUDENT:
        return wilcoxon_below(differences, epsilon), "wilcoxon"
    return student_below(differences, epsilon), "student"


def _indicators(
    left_out: str, people: Sequence[Mapping[str, Choice]], judge: Sequence[Choice | None]
) -> list[tuple[int, int]]:
    """(W^f, W^h) on each item of a person that somebody else labelled too."""
    indicators: list[tuple[int, int]] = []
    for verdicts, own in zip(people, judge, strict=True):
        if left_out not in verdicts or len(verdicts) < 2:
            continue
        others = [verdict for person, verdict in verdicts.items() if person != left_out]
        judge_score = sum(own == verdict for verdict in others)
        human_score = sum(verdicts[left_out] == verdict for verdict in others)
        indicators.append((int(judge_score >= human_score), int(human_score >= judge_score)))
    return indicators
