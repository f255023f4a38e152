"""Where people disagree: what each said, and what a reviewer decides. A decision is a judgment of its own, which an
export takes in place of the votes; the votes stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy import Connection, Row, func, insert, select

from kedge.core.errors import DataError
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.docket import QUESTION, append_judgment, look_at
from kedge.label.projects import Project
from kedge.label.questions import Decision, ItemKind, check_decision
from kedge.label.team.recent import judgments_of
from kedge.label.texts import read_texts

_LOOKED_AT = 500
"""Flags of all projects among which those of one are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one person said, by the places of the answers in the item."""

    person: int
    verdict: str
    outcome: int | None
    ranking: tuple[int, ...] | None
    axes: dict[str, int]
    reason: str | None
    is_doubted: bool
    """Whether the person was paused, for being wrong on gold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An item on which people disagree, or with a label that is doubted."""

    key: str
    kind: str
    is_split: bool
    prompt: Messages
    answers: tuple[Messages, ...]
    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Docket:
    """Items to decide: the widest disagreements first, then labels that are doubted."""

    cases: tuple[Case, ...]
    disagreements: int
    doubted: int
    """Items on which nobody disagrees, with a label of who was paused."""

    @property
    def count(self) -> int:
        return self.disagreements + self.doubted


def read_docket(store: Store, project: Project, most: int, skip: int = 0) -> Docket:
    """So many cases of a project after the first `skip`, and how many there are."""
    docket = tables.docket
    mine = docket.c.project == project.id
    counted = select(docket.c.is_split, func.count()).where(mine).group_by(docket.c.is_split)
    widest = select(docket).where(mine).order_by(docket.c.is_split.desc(), docket.c.spread.desc(), docket.c.item.desc())

    def work(connection: Connection) -> Docket:
        counts = dict(connection.execute(counted).all())
        rows = connection.execute(widest.limit(most).offset(skip)).all() if most else []
        votes = judgments_of(connection, project, [row.item for row in rows])
        return Docket(
            cases=tuple(_case(connection, row, votes[row.item]) for row in rows),
            disagreements=counts.get(True, 0),
            doubted=counts.get(False, 0),
        )

    return store.read(work)


def _case(connection: Connection, listed: Row[Any], votes: Iterable[Row[Any]]) -> Case:
    item = connection.execute(select(tables.item).where(tables.item.c.id == listed.item)).one()
    answer = tables.answer
    hashes = connection.scalars(select(answer.c.text).where(answer.c.item == item.id).order_by(answer.c.place)).all()
    texts = read_texts(connection, [item.prompt, *hashes])
    return Case(
        key=item.key,
        kind=item.kind,
        is_split=listed.is_split,
        prompt=texts[item.prompt],
        answers=tuple(texts[text] for text in hashes),
        votes=tuple(
            Vote(
                person=row.person,
                verdict=row.verdict,
                outcome=row.outcome,
                ranking=None if row.ranking is None else tuple(row.ranking),
                axes=row.axes or {},
                reason=row.reason,
                is_doubted=row.person == listed.doubted,
            )
            for row in votes
            if row.verdict != "skip"
        ),
    )


def decide(store: Store, project: Project, reviewer: Person, key: str, decision: Decision) -> int:
    """What an item is, in the order of its own places; exports take it in place of the votes."""

    def work(connection: Connection) -> int:
        item, order = _item(connection, project, key)
        if decision.verdict == "skip" or decision.edit is not None:
            raise DataError("a reviewer decides, or asks for a clearer guideline")
        check_decision(decision, cast(ItemKind, item.kind), project.questions, len(order))
        seq = _append(store, connection, project, reviewer, item, order, replace(decision, verdict="decided"))
        note(store, connection, "review.decide", {"item": key, "judgment": seq}, who=reviewer.id)
        return seq

    return store.append(work)


def ask_for_guideline(store: Store, project: Project, reviewer: Person, key: str, words: str) -> int:
    """The guideline does not say what is right here: the question is kept for its next version."""
    if not words.strip():
        raise DataError("say what the guideline leaves open")

    def work(connection: Connection) -> int:
        item, order = _item(connection, project, key)
        skipped = Decision(verdict="skip", reason=words)
        seq = _append(store, connection, project, reviewer, item, order, skipped)
        connection.execute(insert(tables.flag).values(judgment=seq, kind=QUESTION, text=words))
        look_at(connection, item.id)
        return seq

    return store.append(work)


def _item(connection: Connection, project: Project, key: str) -> tuple[Row[Any], Sequence[int]]:
    table = tables.item
    item = connection.execute(select(table).where(table.c.project == project.id, table.c.key == key)).first()
    if item is None or item.is_gold:
        raise DataError("there is no such item")
    places = select(func.count()).select_from(tables.answer).where(tables.answer.c.item == item.id)
    return item, range(connection.scalar(places) or 0)


def _append(
    store: Store,
    connection: Connection,
    project: Project,
    reviewer: Person,
    item: Row[Any],
    order: Sequence[int],
    decision: Decision,
) -> int:
    """A judgment of the reviewer on an item; an earlier one of theirs is superseded by it."""
    table = tables.assignment
    number = connection.scalar(select(table.c.id).where(table.c.item == item.id, table.c.person == reviewer.id))
    if number is None:
        number = store.token()
        values = {"id": number, "project": project.id, "item": item.id, "person": reviewer.id}
        rest = {"guideline": project.guideline, "order": list(order), "state": "reviewed", "leased_until": 0}
        connection.execute(insert(table).values(**values, **rest, seconds=0.0))
    last = connection.scalar(
        select(func.max(tables.judgment.c.seq)).where(tables.judgment.c.assignment == number)
    )  # fmt: skip
    content = {
        "assignment": number,
        "verdict": decision.verdict,
        "outcome": decision.outcome,
        "ranking": None if decision.ranking is None else list(decision.ranking),
        "axes": dict(decision.axes) if decision.axes else None,
        "reason": decision.reason,
        "edit": None,
        "seconds": float(decision.seconds),
        "idle_seconds": float(decision.idle_seconds),
        "guideline": project.guideline,
        "supersedes": last,
        "at": store.now(),
    }
    return append_judgment(connection, project.id, item.id, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flagged:
    """A flag with what it is about."""

    kind: str
    words: str
    prompt: Messages
    at: int


def flagged(store: Store, project: Project, most: int) -> list[Flagged]:
    """The newest flags of a project."""
    flag, judgment, assignment, item = tables.flag, tables.judgment, tables.assignment, tables.item
    # Flags first, of which there are few; a join of all begins with the many judgments where SQLite guesses so.
    newest = select(flag.c.judgment, flag.c.kind, flag.c.text).order_by(flag.c.id.desc()).limit(_LOOKED_AT)
    about = (
        select(judgment.c.seq, judgment.c.at, item.c.prompt)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .where(assignment.c.project + 0 == project.id)
    )

    def work(connection: Connection) -> list[Flagged]:
        flags = connection.execute(newest).all()
        known = {
            row.seq: row for row in connection.execute(about.where(judgment.c.seq.in_([f.judgment for f in flags])))
        }
        mine = [row for row in flags if row.judgment in known][:most]
        texts = read_texts(connection, [known[row.judgment].prompt for row in mine])
        return [
            Flagged(
                kind=row.kind,
                words=row.text or "",
                prompt=texts[known[row.judgment].prompt],
                at=known[row.judgment].at,
            )
            for row in mine
        ]

    return store.read(work)
