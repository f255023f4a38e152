"""From a judge's verdicts to labels: both orders, votes and panels. Nothing here asks anybody.

Of two answers, a preference is 1 where the first is better, 0 where the second is, and ½ for a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

import numpy as np

from kedge.feedback.agreement import AgreementInterval, alpha_of_many
from kedge.feedback.ratings import Labels, labels_of
from kedge.feedback.reliability import DawidSkene, dawid_skene_of
from kedge.label.settle import Settled, SettleKind, settle_posterior, settle_steps
from kedge.rewards.pairwise import BothOrders

CLAMP = (0.4, 0.6)
"""Of probabilities after a chain of thought, which is always sure (Bai et al. 2022)."""
_DIGITS = 6
"""Of a certainty: its last bits may be another machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one judge says of a comparison, all its votes together."""

    preference: float | None
    """None where no vote could be read in both orders, or where the judge could not be asked."""
    is_consistent: bool = True
    """Whether the orders agree, in every vote that can be read."""
    probability: float | None = None
    """That the first answer is better: by log-probabilities, else the share of votes where there are several."""
    axes: Mapping[str, float] = field(default_factory=dict[str, float])
    """The preference on each axis, a tie where the orders disagree; axes that cannot be read are absent."""


def verdict_of(votes: Sequence[BothOrders]) -> Verdict:
    """Both orders of each vote, then the votes.

    >>> verdict_of([BothOrders(as_a=1.0, as_b=1.0, probability=0.9)])
    Verdict(preference=1.0, is_consistent=True, probability=0.9, axes={})
    >>> verdict_of([BothOrders(as_a=1.0, as_b=0.0, probability=0.6)])
    Verdict(preference=0.5, is_consistent=False, probability=0.5, axes={})
    >>> verdict_of([BothOrders(as_a=0.0, as_b=0.0)] * 3 + [BothOrders(as_a=1.0, as_b=1.0)]).probability
    0.25
    """
    settled = [value for vote in votes if (value := both_orders(vote.as_a, vote.as_b)) is not None]
    if not settled:
        return Verdict(preference=None)
    share = fmean(settled)
    preference = 1.0 if share > 0.5 else 0.0 if share < 0.5 else 0.5
    readable = [vote for vote in votes if vote.as_a is not None and vote.as_b is not None]
    measured = [vote.probability for vote in readable if vote.probability is not None]
    probability = fmean(measured) if len(measured) == len(readable) else share if len(votes) > 1 else None
    if preference == 0.5 and probability is not None:
        probability = 0.5
    return Verdict(
        preference=preference,
        is_consistent=all(vote.as_a == vote.as_b for vote in readable),
        probability=probability,
        axes=_axes(readable),
    )


def both_orders(as_a: float | None, as_b: float | None) -> float | None:
    """What both orders say; a tie where they disagree, None where one cannot be read.

    >>> both_orders(1.0, 1.0), both_orders(1.0, 0.5), both_orders(None, 1.0)
    (1.0, 0.5, None)
    """
    if as_a is None or as_b is None:
        return None
    return as_a if as_a == as_b else 0.5


def _axes(votes: Sequence[BothOrders]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for vote in votes:
        for axis, (as_a, as_b) in vote.axes.items():
            if (value := both_orders(as_a, as_b)) is not None:
                values.setdefault(axis, []).append(value)
    return {axis: fmean(own) for axis, own in values.items()}


def settle(panel: Sequence[Sequence[Verdict]], kind: SettleKind, *, clamp: bool) -> list[Settled | None]:
    """One label a comparison; None where no judge could be read. A panel of several is settled as people are.

    >>> [settle([[Verdict(preference=p, probability=c)]], "majority", clamp=False)[0].certainty
    ...  for p, c in ((1.0, None), (0.0, 0.2), (0.5, None))]
    [1.0, 0.8, 0.5]
    """
    settled = [_alone(verdict) for verdict in panel[0]] if len(panel) == 1 else _together(panel, kind)
    return [label and _with_certainty(label, clamp=clamp) for label in settled]


def _alone(verdict: Verdict) -> Settled | None:
    if verdict.preference is None:
        return None
    if verdict.preference == 0.5:
        return Settled(better=None, certainty=0.5, margin=0.0, consistent=verdict.is_consistent)
    better = 0 if verdict.preference == 1.0 else 1
    probability = verdict.preference if verdict.probability is None else verdict.probability
    return Settled(
        better=better,
        certainty=probability if better == 0 else 1 - probability,
        margin=0.0,
        consistent=verdict.is_consistent,
    )


def _together(panel: Sequence[Sequence[Verdict]], kind: SettleKind) -> list[Settled | None]:
    posteriors = _posteriors(panel) if kind == "dawid_skene" else None
    settled: list[Settled | None] = []
    for number, verdicts in enumerate(zip(*panel, strict=True)):
        steps = [_step(verdict.preference) for verdict in verdicts if verdict.preference is not None]
        label = None
        if steps:
            label = settle_steps(steps) if posteriors is None else settle_posterior(posteriors[number], steps)
        is_consistent = all(verdict.is_consistent for verdict in verdicts if verdict.preference is not None)
        settled.append(label and replace(label, consistent=label.consistent and is_consistent))
    return settled


def _posteriors(panel: Sequence[Sequence[Verdict]]) -> list[tuple[float, float, float, float]]:
    """P(first, tie, second, both bad) by Dawid and Skene, sides mirrored, every other comparison read from its other
    side: which answer a file names first says nothing of it."""
    rows: list[tuple[float, float, float, float]] = []
    for number, (first, tie, second) in enumerate(fit_panel(panel).posterior.tolist()):
        rows.append((second, tie, first, 0.0) if number % 2 else (first, tie, second, 0.0))
    return rows


def fit_panel(panel: Sequence[Sequence[Verdict]]) -> DawidSkene:
    """Truths and errors of the judges of a panel, from their labels alone."""
    return dawid_skene_of(panel_labels(panel, turned=True), classes=3, mirrored=True)


def panel_labels(panel: Sequence[Sequence[Verdict]], *, turned: bool = False) -> Labels:
    """Classes 0 (first), 1 (tie), 2 (second) of every judge on every comparison."""

    def class_of(number: int, preference: float | None) -> int | None:
        if preference is None:
            return None
        label = 1 + _step(preference)
        return 2 - label if turned and number % 2 else label

    rows = [
        [class_of(number, verdict.preference) for verdict in verdicts]
        for number, verdicts in enumerate(zip(*panel, strict=True))
    ]
    return labels_of(rows)


def panel_agreement(panel: Sequence[Sequence[Verdict]], prompts: Sequence[int]) -> AgreementInterval | None:
    """Krippendorff's α of the judges of a panel; None where no two labelled the same comparison."""
    readable = np.array([[verdict.preference is not None for verdict in judge] for judge in panel])
    if len(panel) == 1 or not (readable.sum(axis=0) > 1).any():
        return None
    return alpha_of_many(panel_labels(panel), prompts, level="nominal", draws=1_000)


def _step(preference: float) -> int:
    return int(np.sign(0.5 - preference))


def _with_certainty(label: Settled, *, clamp: bool) -> Settled:
    """The certainty in its bounds, and the margin that it comes to: 0 for a toss-up, 1 for a sure one."""
    if label.better is None:
        return label
    certainty = min(label.certainty, CLAMP[1]) if clamp else label.certainty
    if certainty <= 0.5:  # the verdict says one thing, its probability another
        return Settled(better=None, certainty=0.5, margin=0.0, consistent=label.consistent)
    certainty = round(certainty, _DIGITS)
    return replace(label, certainty=certainty, margin=round(2 * certainty - 1, _DIGITS))


def ranks_of(answers: int, preferences: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """Places by what each answer won against the others, ties half; comparisons that are missing count as ties.

    >>> ranks_of(3, {(0, 1): 1.0, (0, 2): 0.0, (1, 2): 0.0})
    (2, 3, 1)
    >>> ranks_of(3, {(0, 1): 0.5, (0, 2): 1.0})
    (1, 2, 3)
    """
    totals = [0.0] * answers
    for first in range(answers):
        for second in range(first + 1, answers):
            preference = preferences.get((first, second), 0.5)
            totals[first] += preference
            totals[second] += 1 - preference
    return tuple(1 + sum(other > total for other in totals) for total in totals)


Side = Literal["first", "second", "tie"]


def side_of(preference: float | None) -> Side | None:
    """
    >>> side_of(1.0), side_of(0.5), side_of(None)
    ('first', 'tie', None)
    """
    if preference is None:
        return None
    return "first" if preference > 0.5 else "second" if preference < 0.5 else "tie"
