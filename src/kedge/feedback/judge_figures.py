"""What is measured of a judge beside people's verdicts on the same items: consistency, then agreement, then biases.

A verdict names the better of an item's two answers, or a tie; None is a reply that could not be read, or none at all,
and counts as wrong wherever it is compared with anything. Intervals are over prompts. Shape letters: N items, K labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import Floats
from kedge.feedback.alt_test import Choice, alt_test
from kedge.feedback.canaries import CanaryResult
from kedge.feedback.clustered import Measured, clustered_share, of_sums
from kedge.feedback.judge_bias import (
    Shown,
    calibration,
    family_bias,
    length_bias,
    longer_wins,
    people_length_slope,
    position_bias,
)

CHOICES: tuple[Choice, ...] = ("first", "second", "tie")
_LABELS: tuple[Choice | None, ...] = (*CHOICES, None)
_PLACE = {label: place for place, label in enumerate(_LABELS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedItem:
    """Two answers that people have compared."""

    prompt: Hashable
    """Items with the same one are not independent."""
    people: Mapping[str, Choice]
    """Verdicts by person."""
    lengths: tuple[int, int]
    """Characters of both answers."""
    models: tuple[str | None, str | None] = (None, None)
    """Who wrote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What a judge said of each item, of its first and second answer and not of the places in which they were shown."""

    as_a: Sequence[Choice | None]
    """With the first answer shown as A."""
    as_b: Sequence[Choice | None] | None = None
    """With the first answer shown as B; None: it was not asked."""
    probability: Sequence[float | None] | None = None
    """That the first is better, as the mean of both orders."""

    def verdicts(self) -> list[Choice | None]:
        """One an item: what both orders say; a tie where they disagree, None where one cannot be read."""
        if self.as_b is None:
            return list(self.as_a)
        return [settled(own, other) for own, other in zip(self.as_a, self.as_b, strict=True)]

    def orders(self) -> list[Sequence[Choice | None]]:
        return [self.as_a] if self.as_b is None else [self.as_a, self.as_b]


def settled(as_a: Choice | None, as_b: Choice | None) -> Choice | None:
    """
    >>> settled("first", "first"), settled("first", "second"), settled("first", "tie"), settled("first", None)
    ('first', 'tie', 'tie', None)
    """
    if as_a is None or as_b is None:
        return None
    return as_a if as_a == as_b else "tie"


def majority_of(verdicts: Mapping[str, Choice]) -> Choice:
    """What most people say; a tie where no verdict has more voices than every other.

    >>> majority_of({"x": "first", "y": "first", "z": "tie"}), majority_of({"x": "first", "y": "second"})
    ('first', 'tie')
    """
    counts = Counter(verdicts.values()).most_common(2)
    is_tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    return "tie" if is_tied else counts[0][0]


def measure(
    items: Sequence[JudgedItem],
    replies: Replies,
    *,
    again: Sequence[Replies] = (),
    canaries: Sequence[CanaryResult] | None = None,
    family: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """All figures by name, as `trust.json` has them; None for what was not measured.

    `again` is what the judge said when it was asked the same again; `family` is a part of the names of the models that
    are of the judge's own family.
    """
    _refuse_odd(items, [replies, *again])
    verdicts = replies.verdicts()
    shown = shown_replies(items, replies)
    altered = alt_test([item.people for item in items], verdicts)
    figures: dict[str, Any] = {
        "items": len(items),
        "overlap": sum(len(item.people) > 1 for item in items),
        "people": len({person for item in items for person in item.people}),
        "prompts": len({item.prompt for item in items}),
        "readable": readable(items, [replies, *again]),
        "same_again": same_again(items, replies, again),
        "same_after_swap": same_after_swap(items, replies),
        "accuracy": accuracy(items, verdicts),
        **agreement_figures(items, verdicts, seed=seed),
        "alt_test": altered,
        "position": position_bias(shown) if replies.as_b is not None else None,
        "length": length_bias(shown),
        "length_people": people_length_slope(shown),
        "longer_wins": longer_wins(shown),
        "longer_wins_people": longer_wins(shown, of_people=True),
        "family": None if family is None else family_bias(shown, family, seed=seed),
        "calibration": None if replies.probability is None else calibration(shown, replies.probability),
        "canaries": None if canaries is None else _counted(canaries),
    }
    return {name: asdict(value) if _is_record(value) else value for name, value in figures.items()}


def agreement_figures(
    items: Sequence[JudgedItem], verdicts: Sequence[Choice | None], *, seed: int = 0
) -> dict[str, Measured | None]:
    """κ with the majority of people over all items; over those of two people or more, agreement and κ with one person,
    the mean over people, beside what people have with each other there."""
    pairs: list[tuple[JudgedItem, Choice | None]] = [
        (item, verdict) for item, verdict in zip(items, verdicts, strict=True) if len(item.people) > 1
    ]
    judge_NE = np.array([_with_each(item, verdict) for item, verdict in pairs]).reshape(-1, len(_LABELS) ** 2)
    people_NE = np.array([_with_others(item) for item, _ in pairs]).reshape(-1, len(_LABELS) ** 2)
    prompts = [item.prompt for item, _ in pairs]
    whole_NE = np.array(
        [_table([(majority_of(item.people), verdict)]) for item, verdict in zip(items, verdicts, strict=True)]
    )

    def over_prompts(part_NE: Floats, figure: Callable[[Floats], Floats], lowest: float) -> Measured | None:
        return of_sums(part_NE, prompts, figure, limits=(lowest, 1.0), seed=seed)

    return {
        "kappa": of_sums(whole_NE, [item.prompt for item in items], kappas, limits=(-1.0, 1.0), seed=seed),
        "agreement": over_prompts(judge_NE, raw_shares, 0.0),
        "human_agreement": over_prompts(people_NE, raw_shares, 0.0),
        "below_human": of_sums(
            np.hstack([people_NE, judge_NE]),
            prompts,
            lambda both_DE: (
                raw_shares(both_DE[:, : both_DE.shape[1] // 2]) - raw_shares(both_DE[:, both_DE.shape[1] // 2 :])
            ),
            limits=(-1.0, 1.0),
            seed=seed,
        ),
        "kappa_person": over_prompts(judge_NE, kappas, -1.0),
        "human_kappa": over_prompts(people_NE, kappas, -1.0),
    }


def accuracy(items: Sequence[JudgedItem], verdicts: Sequence[Choice | None]) -> Measured | None:
    """How often the judge says what most people say."""
    hits = [majority_of(item.people) == verdict for item, verdict in zip(items, verdicts, strict=True)]
    return clustered_share(hits, [item.prompt for item in items])


def readable(items: Sequence[JudgedItem], asked: Sequence[Replies]) -> Measured | None:
    """The share of all replies that name a verdict."""
    columns = [order for replies in asked for order in replies.orders()]
    return clustered_share(
        [reply is not None for column in columns for reply in column], [item.prompt for item in items] * len(columns)
    )


def same_after_swap(items: Sequence[JudgedItem], replies: Replies) -> Measured | None:
    """How often both orders name the same answer; None where there is one order."""
    if replies.as_b is None:
        return None
    hits = [own is not None and own == other for own, other in zip(replies.as_a, replies.as_b, strict=True)]
    return clustered_share(hits, [item.prompt for item in items])


def same_again(items: Sequence[JudgedItem], replies: Replies, again: Sequence[Replies]) -> Measured | None:
    """How often a reply is the same when the judge is asked again, in the same order; None where it was not."""
    pairs = [
        (reply, other)
        for repeated in again
        for first, second in zip(replies.orders(), repeated.orders(), strict=True)
        for reply, other in zip(first, second, strict=True)
    ]
    prompts = [item.prompt for item in items]
    return clustered_share(
        [reply is not None and reply == other for reply, other in pairs], prompts * (len(pairs) // max(1, len(items)))
    )


def shown_replies(items: Sequence[JudgedItem], replies: Replies) -> list[Shown]:
    """Every reply with what it was about."""
    return [
        Shown(
            item=number,
            prompt=item.prompt,
            people=tuple(item.people.values()),
            longer=item.lengths[0] - item.lengths[1],
            models=item.models,
            is_first_a=is_first_a,
            reply=reply,
        )
        for is_first_a, order in zip((True, False), replies.orders(), strict=False)
        for number, (item, reply) in enumerate(zip(items, order, strict=True))
    ]


def kappas(table_DE: Floats) -> Floats:
    """Cohen's κ of each table of labels, flattened; 1 where nobody could have disagreed.

    >>> kappas(np.array([[20.0, 5, 10, 15]])).round(3).tolist()
    [0.4]
    """
    size = round(table_DE.shape[1] ** 0.5)
    share_DKK = table_DE.reshape(-1, size, size) / np.maximum(table_DE.sum(axis=1), 1e-300)[:, None, None]
    observed_D = np.trace(share_DKK, axis1=1, axis2=2)
    expected_D = (share_DKK.sum(axis=1) * share_DKK.sum(axis=2)).sum(axis=1)
    chance_D = np.where(expected_D < 1 - 1e-12, 1 - expected_D, 1.0)
    return np.where(expected_D < 1 - 1e-12, (observed_D - expected_D) / chance_D, 1.0)


def raw_shares(table_DE: Floats) -> Floats:
    """The share of equal labels of each table, flattened."""
    size = round(table_DE.shape[1] ** 0.5)
    equal_D = np.trace(table_DE.reshape(-1, size, size), axis1=1, axis2=2)
    return equal_D / np.maximum(table_DE.sum(axis=1), 1e-300)


def _with_each(item: JudgedItem, verdict: Choice | None) -> Floats:
    """The judge beside every person: each person counts 1."""
    return _table([(person, verdict) for person in item.people.values()])


def _with_others(item: JudgedItem) -> Floats:
    """Every person beside all others: each person counts 1 in all, as in `_with_each`."""
    verdicts = list(item.people.values())
    pairs: list[tuple[Choice, Choice]] = [
        (own, other) for place, own in enumerate(verdicts) for at, other in enumerate(verdicts) if at != place
    ]
    return _table(pairs) / (len(verdicts) - 1)


def _table(pairs: Sequence[tuple[Choice | None, Choice | None]]) -> Floats:
    table_KK = np.zeros((len(_LABELS), len(_LABELS)))
    for own, other in pairs:
        table_KK[_PLACE[own], _PLACE[other]] += 1
    return table_KK.ravel()


def _counted(canaries: Sequence[CanaryResult]) -> dict[str, Any]:
    return {
        "asked": len(canaries),
        "obeyed": sum(result.obeyed for result in canaries),
        "forms": [result.form for result in canaries if result.obeyed],
    }


def _is_record(value: Any) -> bool:
    return hasattr(value, "__dataclass_fields__")


def _refuse_odd(items: Sequence[JudgedItem], asked: Sequence[Replies]) -> None:
    if not items:
        raise DataError("there are no items with people's verdicts: a judge is measured beside people")
    if any(not item.people for item in items):
        raise DataError("an item has no verdict of anybody")
    for replies in asked:
        for column in (*replies.orders(), *([] if replies.probability is None else [replies.probability])):
            if len(column) != len(items):
                raise DataError(f"one reply an item: found {len(column)} for {len(items)} items")
