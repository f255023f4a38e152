"""Where people disagree: what each said, and what a reviewer decides. A decision is a judgment of its own, which an
export takes in place of the votes; the votes stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy import Connection, Row, case, func, insert, select

from kedge.core.errors import DataError
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.audit import append_row, last_seq, note
from kedge.label.database import Store
from kedge.label.export import effective
from kedge.label.projects import Project
from kedge.label.questions import Decision, ItemKind, check_decision
from kedge.label.texts import read_texts

QUESTION = "guideline"
"""The kind of flag that asks for a clearer guideline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one person said, by the places of the answers in the item."""

    person: int
    verdict: str
    outcome: int | None
    ranking: tuple[int, ...] | None
    axes: dict[str, int]
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An item on which people disagree."""

    key: str
    kind: str
    prompt: Messages
    answers: tuple[Messages, ...]
    votes: tuple[Vote, ...]


def count_cases(store: Store, project: Project) -> int:
    """How many disagreements nobody has decided."""
    return len(store.read(lambda connection: _open_cases(connection, project)))


def next_cases(store: Store, project: Project, most: int) -> list[Case]:
    """The disagreements that are to be decided, the widest first."""

    def work(connection: Connection) -> list[Case]:
        numbers = _open_cases(connection, project)[:most]
        rows = connection.execute(
            effective(project, last_seq(connection, tables.judgment)).where(tables.item.c.id.in_(numbers))
        ).all()
        return [_case(connection, number, [row for row in rows if row.item == number]) for number in numbers]

    return store.read(work)


def _open_cases(connection: Connection, project: Project) -> list[int]:
    """Items with votes for both sides, or rankings that differ, which no reviewer has touched; widest first."""
    as_of = last_seq(connection, tables.judgment)
    votes = effective(project, as_of).order_by(None).subquery()
    spread = func.max(func.coalesce(votes.c.outcome, 0)) - func.min(func.coalesce(votes.c.outcome, 0))
    is_split = (
        func.max(case((votes.c.outcome > 0, 1), else_=0))
        + func.max(case((votes.c.outcome < 0, 1), else_=0))
        + func.max(case((votes.c.verdict == "both_bad", 1), else_=0))
    ) > 1
    is_ranked = func.count(func.distinct(votes.c.ranking)) > 1
    rows = connection.execute(
        select(votes.c.item).group_by(votes.c.item).having(is_split | is_ranked).order_by(spread.desc(), votes.c.item)
    )
    touched = _touched(connection, project)
    return [number for number in rows.scalars() if number not in touched]


def _touched(connection: Connection, project: Project) -> set[int]:
    judgment, assignment, flag = tables.judgment, tables.assignment, tables.flag
    decided = (
        select(assignment.c.item)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .where(assignment.c.project == project.id, judgment.c.verdict == "decided")
    )
    asked = (
        select(assignment.c.item)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .join(flag, flag.c.judgment == judgment.c.seq)
        .where(assignment.c.project == project.id, flag.c.kind == QUESTION)
    )
    return {*connection.scalars(decided), *connection.scalars(asked)}


def _case(connection: Connection, number: int, votes: Iterable[Row[Any]]) -> Case:
    item = connection.execute(select(tables.item).where(tables.item.c.id == number)).one()
    answer = tables.answer
    hashes = connection.scalars(select(answer.c.text).where(answer.c.item == number).order_by(answer.c.place)).all()
    texts = read_texts(connection, [item.prompt, *hashes])
    return Case(
        key=item.key,
        kind=item.kind,
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
            )
            for row in votes
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
    return append_row(connection, tables.judgment, content)


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
    query = (
        select(flag.c.kind, flag.c.text, judgment.c.at, item.c.prompt)
        .join(judgment, judgment.c.seq == flag.c.judgment)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .where(assignment.c.project == project.id)
        .order_by(flag.c.id.desc())
        .limit(most)
    )

    def work(connection: Connection) -> list[Flagged]:
        rows = connection.execute(query).all()
        texts = read_texts(connection, [row.prompt for row in rows])
        return [Flagged(kind=row.kind, words=row.text or "", prompt=texts[row.prompt], at=row.at) for row in rows]

    return store.read(work)
