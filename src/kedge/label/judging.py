"""Judgments: only ever added. A correction supersedes, an undo supersedes, nothing is updated.

The id of an assignment is the key that makes a repeated message harmless: the same decision twice is one judgment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from kedge.core.errors import DataError
from kedge.data.examples import Message
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.database import Store
from kedge.label.docket import append_judgment
from kedge.label.projects import Project
from kedge.label.questions import Decision, ItemKind, check_decision, to_places
from kedge.label.texts import put_messages
from kedge.label.work import LEASE_MS, NoSuchAssignment, change_have, own_assignment

UNDO_MS = 10 * 60 * 1000


def judge(
    store: Store, project: Project, person: Person, assignment: str, decision: Decision, *, corrects: bool = False
) -> int:
    """Write a decision down and give its number, which acknowledges that it is on disk.

    The same decision again gives the number of the first. Another one needs `corrects`.
    """

    return store.append(
        lambda connection: write_judgment(store, connection, project, person, assignment, decision, corrects=corrects)
    )


def write_judgment(
    store: Store,
    connection: Connection,
    project: Project,
    person: Person,
    assignment: str,
    decision: Decision,
    *,
    corrects: bool = False,
) -> int:
    """The same inside of a transaction."""
    row = own_assignment(connection, person, assignment)
    if row.project != project.id:
        raise NoSuchAssignment("there is no such assignment")
    check_decision(decision, cast(ItemKind, row.kind), project.questions, len(row.order))
    values = _values(connection, row, decision)
    last = _last(connection, assignment)
    if last is not None and last.verdict != "undone":
        if all(getattr(last, name) == values[name] for name in _CONTENT):
            return last.seq
        if not corrects:
            raise DataError(f"this assignment was judged already (number {last.seq}); say that it is a correction")
    _settle_assignment(connection, row, decision)
    # Last, for it holds up all others until the commit.
    seq = append_judgment(
        connection,
        row.project,
        row.item,
        {**values, "supersedes": None if last is None else last.seq, "at": store.now()},
    )
    flags = [{"judgment": seq, "kind": kind, "text": words} for kind, words in decision.flags.items()]
    if flags:
        connection.execute(insert(tables.flag), flags)
    return seq


_CONTENT = ("verdict", "outcome", "ranking", "axes", "reason", "edit")


def _values(connection: Connection, row: Any, decision: Decision) -> dict[str, Any]:
    outcome, ranking, axes = to_places(decision, cast(Sequence[int], row.order))
    edit = None if decision.edit is None else put_messages(connection, (Message("assistant", decision.edit),))
    return {
        "assignment": row.id,
        "verdict": decision.verdict,
        "outcome": outcome,
        "ranking": ranking,
        "axes": axes,
        "reason": decision.reason,
        "edit": edit,
        "seconds": float(decision.seconds),
        "idle_seconds": float(decision.idle_seconds),
        "guideline": row.guideline,
    }


def undo(store: Store, person: Person, assignment: str) -> int:
    """Take the last judgment of an assignment back, within ten minutes; the person holds the item again."""

    def work(connection: Connection) -> int:
        row = own_assignment(connection, person, assignment)
        last = _last(connection, assignment)
        if last is None or last.verdict == "undone":
            raise DataError("there is nothing to undo")
        if store.now() - last.at > UNDO_MS:
            raise DataError("a judgment can be undone for ten minutes; send a correction instead")
        values = {"assignment": row.id, "verdict": "undone", "seconds": 0.0, "idle_seconds": 0.0}
        _move(connection, row, "leased", leased_until=store.now() + LEASE_MS, is_right=None)
        return append_judgment(
            connection,
            row.project,
            row.item,
            {**values, "guideline": row.guideline, "supersedes": last.seq, "at": store.now()},
        )

    return store.append(work)


def _last(connection: Connection, assignment: str) -> Row[Any] | None:
    return connection.execute(_LAST, {"of": assignment}).first()


_LAST = (
    select(tables.judgment)
    .where(tables.judgment.c.assignment == bindparam("of"))
    .order_by(tables.judgment.c.seq.desc())
    .limit(1)
)


_COUNTED = ("leased", "done")
"""States of an assignment that count as a label of its item, or as one to come."""


def _settle_assignment(connection: Connection, row: Any, decision: Decision) -> None:
    state = "skipped" if decision.verdict == "skip" else "done"
    is_right = _is_right(connection, row, decision) if row.is_gold and state == "done" else None
    _move(connection, row, state, leased_until=0, is_right=is_right, seconds=row.seconds + decision.seconds)


def _move(connection: Connection, row: Any, state: str, **values: Any) -> None:
    """Put an assignment into a state; its item has one label more or less by it."""
    table = tables.assignment
    connection.execute(update(table).where(table.c.id == row.id).values(state=state, **values))
    by = (state in _COUNTED) - (row.state in _COUNTED)
    if by and not row.is_gold:
        change_have(connection, row.item, by)


def _is_right(connection: Connection, row: Any, decision: Decision) -> int:
    gold = connection.execute(select(tables.gold).where(tables.gold.c.item == row.item)).one()
    outcome, ranking, _ = to_places(decision, cast(Sequence[int], row.order))
    return int(is_right(outcome, ranking, expected=gold.expected, tolerance=gold.tolerance))


def is_right(
    outcome: int | None, ranking: Sequence[int] | None, *, expected: int | Sequence[int], tolerance: int
) -> bool:
    """Whether a verdict on gold is right: within so many steps, or with so few pairs of answers in the wrong order.

    >>> is_right(-1, None, expected=-2, tolerance=1), is_right(1, None, expected=-2, tolerance=1)
    (True, False)
    >>> is_right(None, [1, 3, 2], expected=[1, 2, 3], tolerance=0)
    False
    """
    if isinstance(expected, int):
        return outcome is not None and abs(outcome - expected) <= tolerance
    if ranking is None:
        return False
    places = range(len(expected))
    wrong = sum((expected[a] < expected[b]) and ranking[a] >= ranking[b] for a in places for b in places if a != b)
    return wrong <= tolerance
