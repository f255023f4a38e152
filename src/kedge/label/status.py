"""How a project stands: progress, people, gold, hours, flags; one pass over narrow indexes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select

from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.audit import last_seq
from kedge.label.database import Store
from kedge.label.projects import Project


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonStatus:
    name: str
    """The address; of who was forgotten, the pseudonym of exports."""
    labels: int
    skipped: int
    gold: int
    gold_right: int
    hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    items: int
    wanted: int
    """Labels that all items together want."""
    given: int
    """Labels that were given to them, gold apart."""
    leased: int
    gold_items: int
    flags: dict[str, int]
    guideline: int
    as_of: int
    """The number of the last judgment in the store."""
    people: tuple[PersonStatus, ...]

    def lines(self) -> Iterator[str]:
        share = f" ({self.given / self.wanted:.1%})" if self.wanted else ""
        yield f"{self.items:,} items, {self.given:,} of {self.wanted:,} labels{share}, {self.leased:,} being made"
        yield f"{self.gold_items:,} gold items; guideline version {self.guideline}; as of {self.as_of}"
        if self.flags:
            yield "flags: " + ", ".join(f"{count} {kind}" for kind, count in self.flags.items())
        for person in self.people:
            gold = f"gold {person.gold_right} of {person.gold}" if person.gold else "no gold yet"
            yield (
                f"  {person.name}: {person.labels:,} labels, {person.skipped:,} skipped, {gold}, {person.hours:.1f} h"
            )


def status(store: Store, project: Project) -> Status:
    """How the project stands now."""
    return store.read(lambda connection: _status(connection, project))


def _status(connection: Connection, project: Project) -> Status:
    item = tables.item
    ordinary = case((item.c.is_gold, 0), else_=1)
    items = connection.execute(
        select(func.count(), func.sum(ordinary), func.sum(item.c.wanted)).where(item.c.project == project.id)
    ).one()
    people = _people(connection, project)
    count, plain, wanted = (int(value or 0) for value in items)
    version = connection.scalar(
        select(func.max(tables.guideline.c.version)).where(tables.guideline.c.project == project.id)
    )
    return Status(
        items=plain,
        wanted=wanted,
        given=sum(person.labels for person, _ in people),
        leased=sum(leased for _, leased in people),
        gold_items=count - plain,
        flags=_flags(connection, project),
        guideline=version or 0,
        as_of=last_seq(connection, tables.judgment),
        people=tuple(person for person, _ in people),
    )


def _people(connection: Connection, project: Project) -> list[tuple[PersonStatus, int]]:
    table, person = tables.assignment, tables.person
    rows = connection.execute(
        select(
            table.c.person,
            table.c.state,
            func.count().label("count"),
            func.count(table.c.is_right).label("gold"),
            func.sum(table.c.is_right).label("right"),
            func.sum(table.c.seconds).label("seconds"),
        )
        .where(table.c.project == project.id)
        .group_by(table.c.person, table.c.state)
    ).all()
    states: dict[int, dict[str, Any]] = {}
    for row in rows:
        states.setdefault(row.person, {})[row.state] = row
    known = connection.execute(select(person.c.id, person.c.uid, person.c.email).where(person.c.id.in_(list(states))))
    names = {row.id: row.email or pseudonym(project, row.uid) for row in known}
    return [_person(names[number], states[number]) for number in sorted(states, key=lambda number: names[number])]


def _person(name: str, states: dict[str, Any]) -> tuple[PersonStatus, int]:
    def count(state: str) -> int:
        return states[state].count if state in states else 0

    done = states.get("done")
    gold = done.gold if done is not None else 0
    person = PersonStatus(
        name=name,
        labels=count("done") - gold,
        skipped=count("skipped"),
        gold=gold,
        gold_right=int(done.right or 0) if done is not None else 0,
        hours=sum(float(row.seconds or 0) for row in states.values()) / 3600,
    )
    return person, count("leased")


def _flags(connection: Connection, project: Project) -> dict[str, int]:
    flag, judgment, assignment = tables.flag, tables.judgment, tables.assignment
    # As a value for each flag, of which there are few: a join begins with the many judgments where SQLite guesses so.
    own = (
        select(assignment.c.project)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .where(judgment.c.seq == flag.c.judgment)
        .scalar_subquery()
    )
    rows = connection.execute(
        select(flag.c.kind, func.count()).where(own == project.id).group_by(flag.c.kind).order_by(flag.c.kind)
    )
    return dict(rows.all())
