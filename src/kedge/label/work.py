"""The next item for a person: by priority, where labels are missing, never one that the person has had.

A lease lasts 30 minutes; what is not answered by then goes back to the queue. Gold comes among the others and looks
like them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Integer, Select, bindparam, exists, func, insert, or_, select, update

from kedge.core.errors import DataError
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.repeats import lease_again
from kedge.label.texts import read_texts

LEASE_MS = 30 * 60 * 1000
_EXPIRED_AT_ONCE = 100


class NoSuchAssignment(DataError):
    """Nothing by this name, or another person's: which of the two is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All that an annotator is shown. Neither the item's number, nor models, nor whether it is gold."""

    assignment: str
    kind: str
    prompt: Messages
    answers: tuple[Messages, ...]
    """In the order that was drawn for this person."""
    questions: Mapping[str, Any]
    guideline: int
    leased_until: int


def next_task(store: Store, project: Project, person: Person, kind: str | None = None) -> Task | None:
    """Lease an item to a person; the one that the person holds already comes again. None: nothing is left to do.

    With `kind` only items of this kind are looked at.
    """

    def work(connection: Connection) -> Task | None:
        _lock_person(store, connection, person)
        now = store.now()
        expire(store, connection, now)
        table = tables.assignment
        held = select(table.c.id).where(
            table.c.project == project.id, table.c.person == person.id, table.c.state == "leased"
        )
        if kind is not None:
            held = held.join(_ITEM, _ITEM.c.id == table.c.item).where(_ITEM.c.kind == kind)
        open_lease = connection.execute(held).first()
        if open_lease is not None:
            connection.execute(update(table).where(table.c.id == open_lease.id).values(leased_until=now + LEASE_MS))
            return read_task(connection, project, open_lease.id)
        again = None if kind else lease_again(store, connection, project, person, until=now + LEASE_MS)
        if again is not None:
            return read_task(connection, project, again)
        item = _choose(store, connection, project, person, kind)
        return None if item is None else read_task(connection, project, lease(store, connection, project, person, item))

    return store.write(work)


def give_back(store: Store, person: Person, assignment: str) -> None:
    """Return a lease: the item may go to others now, and to this person again."""

    def work(connection: Connection) -> None:
        row = own_assignment(connection, person, assignment)
        if row.state == "leased":
            _return(connection, [(row.id, row.item, row.is_gold)])

    store.write(work)


def expire(store: Store, connection: Connection, now: int) -> int:
    """Take back the leases that have run out; returns how many."""
    rows = [(row.id, row.item, row.is_gold) for row in connection.execute(_LATE, {"now": now})]
    _return(connection, rows)
    return len(rows)


def _return(connection: Connection, rows: list[tuple[str, int, bool]]) -> None:
    # In the order of items: transactions that return several must not wait for each other in a circle.
    for number, item, is_gold in sorted(rows, key=lambda row: row[1]):
        connection.execute(
            update(tables.assignment).where(tables.assignment.c.id == number).values(state="returned", leased_until=0)
        )
        if not is_gold:
            change_have(connection, item, -1)


def change_have(connection: Connection, item: int, by: int) -> None:
    connection.execute(_CHANGE_HAVE, {"number": item, "by": by})


_ITEM = tables.item
_CHANGE_HAVE = (
    update(_ITEM).where(_ITEM.c.id == bindparam("number")).values(have=_ITEM.c.have + bindparam("by", type_=Integer))
)


def own_assignment(connection: Connection, person: Person, assignment: str) -> Any:
    """The assignment with its item's kind, locked; the error is the same whether it is unknown or another's."""
    row = connection.execute(_OWN, {"assignment": assignment, "person": person.id}).first()
    if row is None:
        raise NoSuchAssignment("there is no such assignment")
    return row


_ASSIGNMENT = tables.assignment
_OWN = (
    select(_ASSIGNMENT, _ITEM.c.kind, _ITEM.c.is_gold)
    .join(_ITEM, _ITEM.c.id == _ASSIGNMENT.c.item)
    .where(_ASSIGNMENT.c.id == bindparam("assignment"), _ASSIGNMENT.c.person == bindparam("person"))
    .with_for_update(of=_ASSIGNMENT)
)
_LATE = (
    select(_ASSIGNMENT.c.id, _ASSIGNMENT.c.item, _ITEM.c.is_gold)
    .join(_ITEM, _ITEM.c.id == _ASSIGNMENT.c.item)
    .where(_ASSIGNMENT.c.state == "leased", _ASSIGNMENT.c.leased_until <= bindparam("now"))
    .order_by(_ASSIGNMENT.c.leased_until)
    .limit(_EXPIRED_AT_ONCE)
    .with_for_update(skip_locked=True, of=_ASSIGNMENT)
)
_SHOWN = (
    select(
        _ASSIGNMENT.c.order,
        _ASSIGNMENT.c.guideline,
        _ASSIGNMENT.c.leased_until,
        _ITEM.c.kind,
        _ITEM.c.prompt,
        _ITEM.c.id,
    )
    .join(_ITEM, _ITEM.c.id == _ASSIGNMENT.c.item)
    .where(_ASSIGNMENT.c.id == bindparam("assignment"))
)
_ANSWERS = select(tables.answer.c.place, tables.answer.c.text).where(tables.answer.c.item == bindparam("item"))


def _lock_person(store: Store, connection: Connection, person: Person) -> None:
    """Two requests of one person come one after the other; who was forgotten gets nothing."""
    table = tables.person
    query = select(table.c.forgotten).where(table.c.id == person.id)
    row = connection.execute(query if store.is_sqlite else query.with_for_update()).first()
    if row is None or row.forgotten is not None:
        raise DataError("this person has no account any more")


def _choose(store: Store, connection: Connection, project: Project, person: Person, kind: str | None) -> Any:
    """An item that lacks labels, or now and then a gold one in its place."""
    item = tables.item
    query = (
        _suitable(person, project, kind)
        .where(item.c.have < item.c.wanted)
        .order_by(item.c.priority.desc(), item.c.id)
        .limit(1)
    )
    ordinary = connection.execute(query.with_for_update(skip_locked=True, of=item)).first()
    if ordinary is None and not store.is_sqlite:
        # The last items may be locked for a moment: wait for them before saying that nothing is left.
        ordinary = connection.execute(query.with_for_update(of=item)).first()
    # Gold is looked for every time, so that an answer takes as long with it as without; it is not handed out once
    # there is nothing else, which would give it away.
    gold = gold_from(connection, project, person, store.token(), kind)
    is_golden = store.randomness.random() < project.settings.gold_share
    return gold if gold is not None and ordinary is not None and is_golden else ordinary


def gold_from(connection: Connection, project: Project, person: Person, start: str, kind: str | None = None) -> Any:
    """The first gold item, by hash, after a random place that this person has not had; else from the beginning."""
    item = tables.item
    query = _suitable(person, project, kind).where(item.c.is_gold).order_by(item.c.key).limit(1)
    return connection.execute(query.where(item.c.key > start)).first() or connection.execute(query).first()


def _suitable(person: Person, project: Project, kind: str | None) -> Select[Any, Any]:
    item, had = tables.item, tables.assignment
    conditions: list[ColumnElement[bool]] = [
        item.c.project == project.id,
        ~exists().where(had.c.item == item.c.id, had.c.person == person.id, had.c.state != "returned"),
        *fits(person),
    ]
    if kind is not None:
        conditions.append(item.c.kind == kind)
    return select(item.c.id, item.c.is_gold).where(*conditions)


def fits(person: Person) -> list[ColumnElement[bool]]:
    """Items in a language that the person knows, and no harm for those who do not take it."""
    item = tables.item
    conditions: list[ColumnElement[bool]] = []
    if person.languages:
        conditions.append(or_(item.c.language.is_(None), item.c.language.in_(person.languages)))
    if not person.takes_harm:
        conditions.append(~item.c.is_harmful)
    return conditions


def lease(
    store: Store,
    connection: Connection,
    project: Project,
    person: Person,
    item: Any,
    state: str = "leased",
    *,
    shown: Sequence[int] | None = None,
) -> str:
    """Give an item to a person, with the sides drawn for them (or as they were `shown`), and tell the assignment."""
    table, until = tables.assignment, store.now() + LEASE_MS
    returned = connection.execute(
        update(table)
        .where(table.c.item == item.id, table.c.person == person.id)
        .values(state=state, leased_until=until, guideline=project.guideline)
        .returning(table.c.id)
    ).first()
    if not item.is_gold:
        change_have(connection, item.id, 1)
    if returned is not None:
        return returned.id
    places = select(func.count()).select_from(tables.answer).where(tables.answer.c.item == item.id)
    order = list(range(connection.scalar(places) or 0)) if shown is None else list(shown)
    if shown is None:
        store.randomness.shuffle(order)
    number = store.token()
    connection.execute(
        insert(table),
        {
            "id": number,
            "project": project.id,
            "item": item.id,
            "person": person.id,
            "guideline": project.guideline,
            "order": order,
            "state": state,
            "leased_until": until,
            "seconds": 0.0,
            "is_right": None,
        },
    )
    return number


def read_task(connection: Connection, project: Project, assignment: str) -> Task:
    """What an assignment shows."""
    row = connection.execute(_SHOWN, {"assignment": assignment}).one()
    rows = connection.execute(_ANSWERS, {"item": row.id})
    hashes = dict(rows.all())
    texts = read_texts(connection, [row.prompt, *hashes.values()])
    return Task(
        assignment=assignment,
        kind=row.kind,
        prompt=texts[row.prompt],
        answers=tuple(texts[hashes[place]] for place in row.order),
        questions=project.questions,
        guideline=row.guideline,
        leased_until=row.leased_until,
    )
