"""How far the people of a project agree: Krippendorff's α of what they were asked, clustered by prompt.

A page that shows it must not wait for a million judgments: of many, items are taken by their hash, which is random, and
those that several people were asked have the lowest hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, exists, func, select

from kedge.core.quoting import count
from kedge.core.stats import places_of
from kedge.feedback.agreement import Level, alpha_of_many
from kedge.feedback.ratings import Labels
from kedge.label import tables
from kedge.label.projects import Project
from kedge.label.settle import ranked_pairs

MOST_LABELS = 4_000
"""That a status reads: α is then known to about ±0.03."""
_DRAWS = 1_000
_LEVELS: dict[str, Level] = {"pair": "ordinal", "rank": "nominal", "thumb": "nominal"}
NOT_LABELS = ("skip", "undone", "written", "decided")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """α of one question with its 95 % interval."""

    alpha: float
    low: float
    high: float
    items: int
    """That two people or more have labelled."""
    prompts: int
    is_sample: bool
    """Whether only a part of the items was read."""

    def in_words(self) -> str:
        of = " (a sample)" if self.is_sample else ""
        return f"α {self.alpha:.2f} [{self.low:.2f}, {self.high:.2f}] on {count(self.items, 'item')}{of}"


def read_agreement(
    connection: Connection,
    project: Project,
    *,
    as_of: int | None = None,
    items: Collection[int] | None = None,
    most: int | None = None,
) -> dict[str, Agreement]:
    """By question (`pair`, `rank`, `thumb`, `axes.helpful`, …), where two people labelled the same item.

    `most` labels are read, about; `items` are the numbers of those that count, else all do.
    """
    highest = None if most is None else _highest_key(connection, project, most)
    rows = connection.execute(_query(project, as_of, highest).execution_options(yield_per=10_000))
    wanted = None if items is None else frozenset(items)
    counted = (row for row in rows if wanted is None or row.item in wanted)
    return agreement_of(counted, is_sample=highest is not None)


def agreement_of(rows: Iterable[Any], *, is_sample: bool) -> dict[str, Agreement]:
    """The same of judgments that are labels (no `NOT_LABELS`), with their item, person and prompt."""
    labels: dict[str, _Labels] = {}
    for row in rows:
        for question, key, label in _labels(row):
            labels.setdefault(question, _Labels()).add((row.item, *key), row.person, label, row.prompt)
    intervals = {question: own.agreement(question, is_sample) for question, own in sorted(labels.items())}
    return {question: interval for question, interval in intervals.items() if interval is not None}


def _highest_key(connection: Connection, project: Project, most: int) -> str | None:
    """The hash below which items have about so many labels; None where all of them have no more."""
    assignment, item = tables.assignment, tables.item
    done = select(assignment.c.id).where(assignment.c.project == project.id, assignment.c.state == "done").limit(most)
    if (connection.scalar(select(func.count()).select_from(done.subquery())) or 0) < most:
        return None
    # One after the other by hash: as many items as could have so many labels, were each labelled twice.
    keys = select(item.c.key).where(item.c.project == project.id).order_by(item.c.key).offset(most // 2).limit(1)
    return connection.scalar(keys)


def _query(project: Project, as_of: int | None, highest: str | None) -> Any:
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    later = judgment.alias("later")
    is_superseded = later.c.supersedes == judgment.c.seq
    query = (
        select(
            assignment.c.item,
            assignment.c.person,
            item.c.prompt,
            judgment.c.verdict,
            judgment.c.outcome,
            judgment.c.ranking,
            judgment.c.axes,
        )
        .select_from(item)
        .join(assignment, assignment.c.item == item.c.id)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .where(
            item.c.project == project.id,
            ~item.c.is_gold,
            item.c.repeats.is_(None),
            item.c.have > 1,
            judgment.c.verdict.not_in(NOT_LABELS),
            ~exists().where(is_superseded if as_of is None else is_superseded & (later.c.seq <= as_of)),
        )
    )
    if as_of is not None:
        query = query.where(judgment.c.seq <= as_of)
    return query if highest is None else query.where(item.c.key < highest)


def _labels(row: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    match row.verdict:
        case "ranking":
            yield from (("rank", (a, b), step) for a, b, (step,) in ranked_pairs([row.ranking]))
        case "thumb":
            yield "thumb", (), row.outcome
        case _:
            yield "pair", (), row.outcome or 0  # both bad: neither is better
            yield from ((f"axes.{name}", (), step) for name, step in (row.axes or {}).items())


class _Labels:
    """The labels of one question, as they come."""

    def __init__(self) -> None:
        self._items: list[tuple[int, ...]] = []
        self._people: list[int] = []
        self._labels: list[int] = []
        self._prompts: dict[tuple[int, ...], str] = {}

    def add(self, item: tuple[int, ...], person: int, label: int, prompt: str) -> None:
        self._items.append(item)
        self._people.append(person)
        self._labels.append(label)
        self._prompts.setdefault(item, prompt)

    def agreement(self, question: str, is_sample: bool) -> Agreement | None:
        item_M = places_of(self._items)
        if not (np.bincount(item_M) > 1).any():
            return None
        values, class_M = np.unique(np.array(self._labels, dtype=np.int64), return_inverse=True)
        person_M = places_of(self._people)
        labels = Labels(
            item_M=item_M,
            person_M=person_M,
            class_M=class_M,
            values=tuple(float(value) for value in values),
            items=len(self._prompts),
            people=int(person_M.max()) + 1,
        )
        prompts = [self._prompts[item] for item in dict.fromkeys(self._items)]  # as `places_of` numbers them
        interval = alpha_of_many(labels, prompts, level=_LEVELS.get(question, "ordinal"), draws=_DRAWS)
        return Agreement(
            alpha=interval.value,
            low=interval.low,
            high=interval.high,
            items=interval.items,
            prompts=interval.clusters,
            is_sample=is_sample,
        )
