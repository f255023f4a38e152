"""Whom an export believes: nobody more than others, who is right on gold, or as Dawid and Skene find from all labels.

What is believed is read from judgments up to a number alone, so that an export of that number never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, exists, select, text

from kedge.feedback.ratings import Labels
from kedge.feedback.reliability import DawidSkene, dawid_skene_of
from kedge.label import tables
from kedge.label.judging import is_right
from kedge.label.projects import Project
from kedge.label.settle import (
    BOTH_BAD,
    FIRST,
    MIRROR,
    SECOND,
    TIE,
    Settled,
    SettleKind,
    class_of,
    ranked_pairs,
    settle_posterior,
    settle_ranks,
    settle_steps,
)

_PRIOR_GOLD = 2
"""So many gold questions, answered as people do on the whole, are added to those that a person had."""
DECIDED = "decided"
"""The verdict of a reviewer, which stands in place of votes."""
_THUMB = (-1, -1)
"""In place of the two answers, for a thumb."""
Compared = tuple[int, int, int]
"""An item, and the places of two of its answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """`weights` are of people by their number, `posteriors` of comparisons."""

    kind: SettleKind
    weights: Mapping[int, float] = field(default_factory=dict[int, float])
    posteriors: Mapping[Compared, Sequence[float]] = field(default_factory=dict[Compared, Sequence[float]])
    accuracy: Mapping[int, float] = field(default_factory=dict[int, float])
    """By Dawid and Skene, of people by their number: the probability that they are right about a comparison."""

    def weights_of(self, judgments: Sequence[Row[Any]]) -> list[float] | None:
        if not self.weights or _is_decided(judgments):
            return None
        return [self.weights[row.person] for row in judgments]

    def of_pair(self, judgments: Sequence[Row[Any]]) -> Settled | None:
        """What is settled on two answers; None where both are bad. Who calls them so, and is outvoted, prefers
        neither."""
        both_bad = sum(row.outcome is None for row in judgments)
        if 2 * both_bad >= len(judgments):
            return None
        steps = [row.outcome or 0 for row in judgments]
        return self._settled((judgments[0].item, 0, 1), judgments, steps)

    def of_thumb(self, judgments: Sequence[Row[Any]]) -> Settled:
        settled = self._settled((judgments[0].item, *_THUMB), judgments, [row.outcome for row in judgments])
        assert settled is not None  # nobody calls both bad where there is one
        return settled

    def of_ranking(self, judgments: Sequence[Row[Any]]) -> list[tuple[int, int, Settled]]:
        """Every two answers of a ranking, by their places, and what is settled on them."""
        rankings = [row.ranking for row in judgments]
        pairs = [
            (first, second, self._settled((judgments[0].item, first, second), judgments, steps))
            for first, second, steps in ranked_pairs(rankings)
        ]
        return [(first, second, settled) for first, second, settled in pairs if settled is not None]

    def ranks_of(self, judgments: Sequence[Row[Any]]) -> tuple[int, ...]:
        """One ranking of several: by the mean place, people weighing as they are believed."""
        weights = self.weights_of(judgments)
        if self.accuracy and not _is_decided(judgments):
            weights = [_log_odds(self.accuracy[row.person]) for row in judgments]
        return settle_ranks([row.ranking for row in judgments], weights)

    def _settled(self, key: Compared, judgments: Sequence[Row[Any]], steps: Sequence[int]) -> Settled | None:
        if self.kind == "dawid_skene" and not _is_decided(judgments):
            return settle_posterior(self.posteriors[key], steps)
        return settle_steps(steps, self.weights_of(judgments))


def _is_decided(judgments: Sequence[Row[Any]]) -> bool:
    """Whether a reviewer has spoken, who is believed."""
    return judgments[0].verdict == DECIDED


def read_beliefs(connection: Connection, project: Project, as_of: int, kind: SettleKind) -> Beliefs:
    """From all labels of the project up to `as_of`, held-out ones too: they are of the same people."""
    match kind:
        case "majority":
            return Beliefs(kind=kind)
        case "weighted":
            return Beliefs(kind=kind, weights=_gold_weights(connection, project, as_of))
        case "dawid_skene":
            posteriors, accuracy = _posteriors(connection, project, as_of)
            return Beliefs(kind=kind, posteriors=posteriors, accuracy=accuracy)


def effective(project: Project, as_of: int, *, gold: bool = False) -> Any:
    """The judgments of a project up to a number that nothing up to it supersedes, by item; skips are none, nor are
    items that somebody was asked again. Those of `gold`, or all others. `decisions` has what a reviewer decided."""
    return _standing(project, as_of, gold=gold).where(
        tables.judgment.c.verdict.not_in(("skip", "undone", DECIDED)), tables.item.c.repeats.is_(None)
    )


def decisions(connection: Connection, project: Project, as_of: int) -> dict[int, Row[Any]]:
    """What a reviewer has decided, by item; the last one counts."""
    # As words and not as a value: an index of few rows is chosen by them.
    query = _standing(project, as_of, gold=False).where(text("judgment.verdict = 'decided'"))
    return {row.item: row for row in connection.execute(query)}


def _standing(project: Project, as_of: int, *, gold: bool) -> Any:
    judgment, assignment, item, person = tables.judgment, tables.assignment, tables.item, tables.person
    later = judgment.alias("later")
    return (
        select(judgment, assignment.c.item, assignment.c.order, assignment.c.person, person.c.uid, person.c.role)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .join(person, person.c.id == assignment.c.person)
        .where(
            assignment.c.project == project.id,
            judgment.c.seq <= as_of,
            item.c.is_gold if gold else ~item.c.is_gold,
            ~exists().where(later.c.supersedes == judgment.c.seq, later.c.seq <= as_of),
        )
        .order_by(item.c.id, judgment.c.seq)
    )


def _gold_weights(connection: Connection, project: Project, as_of: int) -> dict[int, float]:
    """The log-odds of being right, at least 0, of everybody; where nobody had gold there are none."""
    golds = {row.item: row for row in connection.execute(select(tables.gold))}
    counts: dict[int, list[int]] = {}
    for row in connection.execute(effective(project, as_of, gold=True)):
        gold = golds[row.item]
        right = is_right(row.outcome, row.ranking, expected=gold.expected, tolerance=gold.tolerance)
        count = counts.setdefault(row.person, [0, 0])
        count[0], count[1] = count[0] + right, count[1] + 1
    seen = sum(own for _, own in counts.values())
    if not seen:
        return {}
    # Of all together, and never quite sure.
    usual = (sum(right for right, _ in counts.values()) + 1) / (seen + 2)
    people = connection.scalars(
        select(tables.assignment.c.person).where(tables.assignment.c.project == project.id).distinct()
    )
    weights: dict[int, float] = {}
    for person in people:
        right, own = counts.get(person, (0, 0))
        weights[person] = _log_odds((right + _PRIOR_GOLD * usual) / (own + _PRIOR_GOLD))
    return weights


def _log_odds(share: float) -> float:
    """At least 0: who errs more often than not has no vote, rather than one for the opposite."""
    share = min(share, 1 - 1e-6)
    return max(0.0, math.log(share / (1 - share))) if share > 0 else 0.0


def _posteriors(
    connection: Connection, project: Project, as_of: int
) -> tuple[dict[Compared, Sequence[float]], dict[int, float]]:
    pairs, thumbs = _Votes(), _Votes()
    for row in connection.execute(effective(project, as_of).execution_options(yield_per=10_000)):
        for key, label in _labels(row):
            votes = thumbs if key[1:] == _THUMB else pairs
            votes.add(key, row.person, label)
    posteriors: dict[Compared, Sequence[float]] = {}
    accuracy: dict[int, float] = {}
    if thumbs.keys:
        fitted = dawid_skene_of(thumbs.labels(2), classes=2)
        for key, (down, up) in zip(thumbs.keys, fitted.posterior.tolist(), strict=True):
            posteriors[key] = (down, 0.0, up, 0.0)
        accuracy.update(thumbs.by_person(fitted))
    if pairs.keys:
        fitted = dawid_skene_of(pairs.labels(len(MIRROR)), classes=len(MIRROR), mirrored=MIRROR)
        for key, posterior in zip(pairs.keys, fitted.posterior.tolist(), strict=True):
            posteriors[key] = _turned(posterior) if _is_turned(key) else posterior
        accuracy.update(pairs.by_person(fitted))
    return posteriors, accuracy


def _labels(row: Row[Any]) -> Iterator[tuple[Compared, int]]:
    match row.verdict:
        case "step" | "both_bad":
            key = (row.item, 0, 1)
            label = class_of(row.outcome or 0, both_bad=row.verdict == "both_bad")
            yield key, MIRROR[label] if _is_turned(key) else label
        case "thumb":
            yield (row.item, *_THUMB), int(row.outcome > 0)
        case "ranking":
            for first, second, (step,) in ranked_pairs([row.ranking]):
                key = (row.item, first, second)
                yield key, MIRROR[class_of(step)] if _is_turned(key) else class_of(step)
        case _:
            pass


def _is_turned(key: Compared) -> bool:
    """Every other comparison is read from its other side: which answer a file names first says nothing of it."""
    return sum(key) % 2 == 0


def _turned(posterior: Sequence[float]) -> Sequence[float]:
    return posterior[SECOND], posterior[TIE], posterior[FIRST], posterior[BOTH_BAD]


class _Votes:
    """Labels of comparisons, numbered as they come."""

    def __init__(self) -> None:
        self.keys: dict[Compared, int] = {}
        self._people: dict[int, int] = {}
        self._rows: list[tuple[int, int, int]] = []

    def add(self, key: Compared, person: int, label: int) -> None:
        item = self.keys.setdefault(key, len(self.keys))
        self._rows.append((item, self._people.setdefault(person, len(self._people)), label))

    def labels(self, classes: int) -> Labels:
        item_M, person_M, class_M = np.array(self._rows, dtype=np.int64).T
        return Labels(
            item_M=item_M,
            person_M=person_M,
            class_M=class_M,
            values=tuple(float(value) for value in range(classes)),
            items=len(self.keys),
            people=len(self._people),
        )

    def by_person(self, fitted: DawidSkene) -> dict[int, float]:
        return dict(zip(self._people, fitted.accuracy.tolist(), strict=True))
