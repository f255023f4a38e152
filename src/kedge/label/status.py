"""How a project stands: progress, agreement, people, gold, hours and pay, flags, and what to do next.

It takes at most a second of a million judgments: counts come from narrow indexes, agreement from a sample of items,
what is told of people from their latest labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, func, select

from kedge.core.quoting import count
from kedge.feedback.people import FEWEST_GOLD
from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.agreement import MOST_LABELS, Agreement, read_agreement
from kedge.label.audit import last_seq
from kedge.label.care import LATEST, Care, Latest, read_care
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.repeats import self_agreements

LOW_ALPHA = 0.3
"""Below it the guideline leaves too much open, or somebody does not read (docs/labels.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonStatus:
    id: int
    name: str
    """The address; of who was forgotten, the pseudonym of exports."""
    labels: int
    skipped: int
    gold: int
    gold_right: int
    hours: float
    pay: float
    care: Care | None = None
    """What their latest labels say; None without any."""

    def line(self, currency: str) -> str:
        gold = f"gold {self.gold_right} of {self.gold}" if self.gold else "no gold yet"
        pay = f", {self.pay:,.2f} {currency}".rstrip() if self.pay else ""
        counts = f"{count(self.labels, 'label')}, {self.skipped:,} skipped"
        return f"{self.name}: {counts}, {gold}, {self.hours:.1f} h{pay}{self._care()}"

    def _care(self) -> str:
        if self.care is None:
            return ""
        parts = [
            *([f"P(left) − ½ {self.care.bias.value:+.2f}"] if self.care.bias else []),
            *([f"ties {self.care.ties.value:.0%}"] if self.care.ties else []),
            *([f"the same again {self.care.again.value:.0%} of {self.care.again.count}"] if self.care.again else []),
        ]
        return "".join(f", {part}" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    name: str
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
    currency: str = ""
    seconds: float | None = None
    """The median of a label."""
    agreement: Mapping[str, Agreement] = field(default_factory=dict[str, Agreement])
    """By question."""

    @property
    def missing(self) -> int:
        return max(0, self.wanted - self.given)

    def lines(self) -> Iterator[str]:
        share = f" ({self.given / self.wanted:.1%})" if self.wanted else ""
        labels = f"{self.given:,} of {count(self.wanted, 'label')}{share}"
        yield f"{count(self.items, 'item')}, {labels}, {self.leased:,} being made"
        yield f"{count(self.gold_items, 'gold item')}; guideline version {self.guideline}; as of {self.as_of}"
        for question, agreement in self.agreement.items():
            yield f"agreement on {question}: {agreement.in_words()}"
        if self.flags:
            yield "flags: " + ", ".join(f"{count} {kind}" for kind, count in self.flags.items())
        yield from (f"  {person.line(self.currency)}" for person in self.people)
        yield "next:"
        yield from (f"  {line}" for line in self.next_steps())

    def next_steps(self) -> Iterator[str]:
        """What to do, the most urgent first."""
        for person in self.people:
            if person.care is not None:
                yield from (f"{person.name}: {worry}" for worry in person.care.worries())
        for question, agreement in self.agreement.items():
            if agreement.high < LOW_ALPHA:
                yield (
                    f"agreement on {question} is below {LOW_ALPHA}: make the guideline clearer; "
                    f"`kedge label calibrate {self.name}` makes a session of the worst disagreements"
                )
        if self.given and not self.agreement:
            yield "nobody has labelled an item that another has: agreement is not known (overlap)"
        if self.items and not self.gold_items:
            yield f"there is no gold: `kedge label add {self.name} FILE --gold`, at least {FEWEST_GOLD} items"
        if self.missing:
            hours = f", about {self.missing * self.seconds / 3600:,.1f} h of people" if self.seconds else ""
            yield f"{count(self.missing, 'label is', 'labels are')} missing{hours}"
        elif self.items:
            yield f"all labels are there: `kedge label export {self.name} --out labels.jsonl`"
        else:
            yield f"there is nothing to label: `kedge label add {self.name} FILE`"


def status(store: Store, project: Project, *, whole: bool = False) -> Status:
    """How the project stands now. With `whole` all labels are read, however long it takes: of many people's work the
    latest labels are too few of each to see drift."""
    return store.read(lambda connection: _status(connection, project, whole=whole))


def _status(connection: Connection, project: Project, *, whole: bool) -> Status:
    item = tables.item
    ordinary = case((item.c.is_gold, 0), (item.c.repeats.is_not(None), 0), else_=1)
    golden = case((item.c.is_gold, 1), else_=0)
    items = connection.execute(
        select(func.sum(golden), func.sum(ordinary), func.sum(item.c.wanted)).where(item.c.project == project.id)
    ).one()
    people, latest = _people(connection, project, whole=whole)
    gold, plain, wanted = (int(value or 0) for value in items)
    version = connection.scalar(
        select(func.max(tables.guideline.c.version)).where(tables.guideline.c.project == project.id)
    )
    return Status(
        name=project.name,
        items=plain,
        wanted=wanted,
        given=sum(person.labels for person, _ in people),
        leased=sum(leased for _, leased in people),
        gold_items=gold,
        flags=_flags(connection, project),
        guideline=version or 0,
        as_of=last_seq(connection, tables.judgment),
        people=tuple(person for person, _ in people),
        currency=project.settings.currency,
        seconds=latest.seconds,
        agreement=read_agreement(connection, project, most=None if whole else MOST_LABELS),
    )


def _people(connection: Connection, project: Project, *, whole: bool) -> tuple[list[tuple[PersonStatus, int]], Latest]:
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
    gold = {number: (int(own["done"].right or 0), own["done"].gold) for number, own in states.items() if "done" in own}
    again = self_agreements(connection, project)
    latest = read_care(connection, project, gold, again, latest=None if whole else LATEST)
    repeated = _repeats(connection, project)
    people = [
        _person(project, number, names, states[number], repeated.get(number, {}), latest.by_person.get(number))
        for number in sorted(states, key=lambda number: names[number])
    ]
    return people, latest


def _person(
    project: Project,
    number: int,
    names: Mapping[int, str],
    states: dict[str, Any],
    again: dict[str, int],
    care: Care | None,
) -> tuple[PersonStatus, int]:
    def number_of(state: str) -> int:
        return (states[state].count if state in states else 0) - again.get(state, 0)

    done = states.get("done")
    gold = done.gold if done is not None else 0
    hours = sum(float(row.seconds or 0) for row in states.values()) / 3600
    person = PersonStatus(
        id=number,
        name=names[number],
        labels=number_of("done") - gold,
        skipped=number_of("skipped"),
        gold=gold,
        gold_right=int(done.right or 0) if done is not None else 0,
        hours=hours,
        pay=project.settings.pay * hours,
        care=care,
    )
    return person, number_of("leased")


def _repeats(connection: Connection, project: Project) -> dict[int, dict[str, int]]:
    """By person and state, the assignments of items that they were asked again, which are no labels."""
    item, table = tables.item, tables.assignment
    # Numbers are above 0, and the project is a sum: so SQLite begins with the few repetitions, else with all items.
    again = select(item.c.id).where(item.c.repeats > 0, item.c.project + 0 == project.id)
    rows = connection.execute(
        select(table.c.person, table.c.state, func.count())
        .where(table.c.item.in_(again))
        .group_by(table.c.person, table.c.state)
    )
    counts: dict[int, dict[str, int]] = {}
    for person, state, number in rows:
        counts.setdefault(person, {})[state] = number
    return counts


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
