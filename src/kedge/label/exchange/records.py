"""An item with what several people said of it, whatever tool it comes from or goes to; and in and out of the store."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, insert, select

from kedge.core.errors import DataError
from kedge.data.decode import Row
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import Person, pseudonym
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.export import Labelled, read_labelled
from kedge.label.incoming import Draft
from kedge.label.items import add_items, key_of
from kedge.label.judging import write_judgment
from kedge.label.projects import Project
from kedge.label.questions import Decision
from kedge.label.texts import encode_messages
from kedge.label.work import LEASE_MS, change_have


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonLabel:
    """What one person said, by the places of the answers; `person` is an id of the tool, never an address."""

    person: str
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledItem:
    draft: Draft
    labels: tuple[PersonLabel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What a file of another tool holds; `unsaid` counts what ours cannot take, by what it is."""

    tool: str
    items: Sequence[LabelledItem]
    unsaid: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def labels(self) -> int:
        return sum(len(item.labels) for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    items: int
    known_items: int
    labels: int
    known_labels: int
    people: int


def take_in(store: Store, project: Project, foreign: Foreign, *, origin: str) -> Taken:
    """Items and labels into the store. A person is known again by an HMAC of the tool and their id there, which is all
    that is kept; a label that a person has given already is left as it is."""
    added = add_items(store, project, [item.draft for item in foreign.items], origin=origin)

    def work(connection: Connection) -> Taken:
        people, labels, known = dict[str, Person](), 0, 0
        ours = _pseudonyms(connection, project)
        for item in foreign.items:
            number, order = _item(connection, project, item.draft)
            for label in item.labels:
                person = people.get(label.person) or ours.get(label.person)
                if person is None:
                    person = _person(store, connection, project, f"{foreign.tool}:{label.person}")
                people[label.person] = person
                is_new = _put(store, connection, project, person, number, order, label.decision)
                labels, known = labels + is_new, known + (not is_new)
        about = {"project": project.name, "labels": labels, "known": known, "from": origin, "tool": foreign.tool}
        note(store, connection, "labels.add", about)
        return Taken(items=added.items, known_items=added.known, labels=labels, known_labels=known, people=len(people))

    return store.write(work)


def _pseudonyms(connection: Connection, project: Project) -> dict[str, Person]:
    """Who is meant by the names of our own exports."""
    rows = connection.execute(select(tables.person)).all()
    return {pseudonym(project, row.uid): _as_person(row) for row in rows}


def _as_person(row: Any) -> Person:
    return Person(id=row.id, uid=row.uid, email=row.email, role=row.role)


def _person(store: Store, connection: Connection, project: Project, name: str) -> Person:
    uid = hmac.new(bytes.fromhex(project.secret), name.encode(), sha256).hexdigest()[:32]
    table = tables.person
    row = connection.execute(select(table).where(table.c.uid == uid)).first()
    if row is None:
        values = {"uid": uid, "role": "annotator", "languages": [], "takes_harm": False, "at": store.now()}
        row = connection.execute(insert(table).values(**values).returning(table)).one()
    return _as_person(row)


def _item(connection: Connection, project: Project, draft: Draft) -> tuple[int, list[int]]:
    """The number of an item, and for each place of the draft's answers the place that it has in the store."""
    item, answer = tables.item, tables.answer
    known = select(item.c.id).where(item.c.project == project.id, item.c.key == key_of(draft))
    number = connection.execute(known).scalar_one()
    texts = dict(connection.execute(select(answer.c.place, answer.c.text).where(answer.c.item == number)).all())
    free = dict(sorted(texts.items()))
    order: list[int] = []
    for given in draft.answers:
        digest = encode_messages(given.text)[0]
        place = next(place for place, text in free.items() if text == digest)
        del free[place]
        order.append(place)
    return number, order


def _put(
    store: Store,
    connection: Connection,
    project: Project,
    person: Person,
    item: int,
    order: Sequence[int],
    decision: Decision,
) -> bool:
    table = tables.assignment
    had = select(table.c.id).where(table.c.item == item, table.c.person == person.id)
    if connection.execute(had).first() is not None:
        return False
    number = store.token()
    values = {
        "id": number,
        "project": project.id,
        "item": item,
        "person": person.id,
        "guideline": project.guideline,
        "order": list(order),
        "state": "leased",
        "leased_until": store.now() + LEASE_MS,
        "seconds": 0.0,
        "is_right": None,
    }
    connection.execute(insert(table), values)
    change_have(connection, item, 1)
    write_judgment(store, connection, project, person, number, decision)
    return True


def read_out(
    connection: Connection, project: Project, as_of: int, *, heldout: bool = False
) -> Iterator[tuple[Labelled, list[PersonLabel]]]:
    """Every item with its texts, and the labels of each person by their pseudonym."""
    for labelled in read_labelled(connection, project, as_of, heldout=heldout):
        labels = [
            PersonLabel(
                person=pseudonym(project, row.uid),
                decision=Decision(
                    verdict=row.verdict,
                    outcome=row.outcome,
                    ranking=None if row.ranking is None else tuple(row.ranking),
                    axes=row.axes,
                    reason=row.reason,
                    edit=None if row.edit is None else "".join(m.content for m in labelled.edits[row.edit]),
                    seconds=row.seconds,
                    idle_seconds=row.idle_seconds,
                ),
            )
            for row in labelled.judgments
        ]
        yield labelled, labels


def read_rows(
    rows: Iterator[Row], tool: str, read: Callable[[Row, Mapping[str, Any], Unsaid], LabelledItem]
) -> Foreign:
    """The items of a file of another tool, by what reads one of its rows; a row that cannot be decoded is an error."""
    unsaid, items = Unsaid(), list[LabelledItem]()
    for row in rows:
        if row.fields is None:
            raise DataError(f"{row.origin}: {row.problem}")
        items.append(read(row, row.fields, unsaid))
    return Foreign(tool=tool, items=items, unsaid=dict(unsaid))


def plain(messages: Messages) -> str | list[dict[str, str]]:
    """A text as other tools take it: plain where one person speaks once, else a conversation."""
    if len(messages) == 1:
        return messages[0].content
    return [{"role": message.role, "content": message.content} for message in messages]


class Unsaid(Counter[str]):
    """What a file holds and the other side cannot say, by what it is."""

    def add(self, what: str) -> None:
        self[what] += 1


def refuse(where: object, field: str, found: object, allowed: str) -> DataError:
    return DataError(f"{where}: field '{field}' is {found!r}; {allowed}")
