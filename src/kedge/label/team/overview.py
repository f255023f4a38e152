"""What who manages a project looks at: agreement with intervals, people one by one, the forecast, the audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sqlalchemy import Connection, Row, select

from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.agreement import NOT_LABELS, Agreement, agreement_of
from kedge.label.database import Store
from kedge.label.docket import DAY_MS
from kedge.label.projects import Project
from kedge.label.status import PersonStatus, Status
from kedge.label.team.recent import recent_judgments

_MOST_JUDGMENTS = 20_000
"""Of a big store the newest judgments are looked at: it is about how people work now."""
WEEK = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two people, the items that both labelled, and the share on which they chose the same side."""

    first: int
    second: int
    items: int
    same: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements:
    weeks: tuple[tuple[str, Agreement | None], ...]
    """Of pairs in the last four weeks, oldest first, from the newest judgments."""
    pairs: tuple[Overlap, ...]
    names: Mapping[int, str]
    judgments: int


def agreements(store: Store, project: Project) -> Agreements:
    """How far people agree; items that two or more have labelled count."""
    return store.read(lambda connection: _agreements(store, connection, project))


def _agreements(store: Store, connection: Connection, project: Project) -> Agreements:
    rows = _shared_judgments(connection, project)
    now = store.now()
    weeks = [
        (_week_words(ago), agreement_of(_of_week(rows, now, ago), is_sample=False).get("pair")) for ago in (3, 2, 1, 0)
    ]
    people = sorted({row.person for row in rows})
    return Agreements(
        weeks=tuple(weeks),
        pairs=tuple(_pairs(rows)),
        names=_names(connection, people),
        judgments=len(rows),
    )


def _shared_judgments(connection: Connection, project: Project) -> Sequence[Row[Any]]:
    """The newest judgments with a side, of items that several people are asked about."""
    rows = recent_judgments(connection, project, most=_MOST_JUDGMENTS)
    return [row for row in rows if row.wanted > 1 and row.outcome is not None and row.verdict not in NOT_LABELS]


def _week_words(ago: int) -> str:
    return ("last 7 days", "the 7 before", "2 weeks before", "3 weeks before")[ago]


def _of_week(rows: Sequence[Row[Any]], now: int, ago: int) -> list[Row[Any]]:
    begin = now - (ago + 1) * WEEK * DAY_MS
    return [row for row in rows if begin < row.at <= begin + WEEK * DAY_MS]


def _pairs(rows: Sequence[Row[Any]]) -> list[Overlap]:
    by_item: dict[int, dict[int, int]] = defaultdict(dict)
    for row in rows:
        by_item[row.item][row.person] = (row.outcome > 0) - (row.outcome < 0)
    both, same = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for sides in by_item.values():
        for first, second in combinations(sorted(sides), 2):
            both[first, second] += 1
            same[first, second] += sides[first] == sides[second]
    return [
        Overlap(first=first, second=second, items=count, same=same[first, second] / count)
        for (first, second), count in sorted(both.items())
    ]


def _names(connection: Connection, people: Sequence[int]) -> dict[int, str]:
    table = tables.person
    rows = connection.execute(select(table.c.id, table.c.uid, table.c.email).where(table.c.id.in_(people)))
    return {row.id: row.email or f"forgotten {row.uid[:6]}" for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Colleague:
    """One person in a project, as who manages it sees them."""

    id: int
    name: str
    role: str
    state: str
    """Failed the quiz, paused or working."""
    work: PersonStatus | None
    """None of who has not begun."""


def colleagues(store: Store, project: Project, status: Status) -> list[Colleague]:
    """Everybody in a project, by name, with the work that a status tells of."""
    return store.read(lambda connection: _colleagues(connection, project, status))


def _colleagues(connection: Connection, project: Project, status: Status) -> list[Colleague]:
    member, person = tables.member, tables.person
    worked = {row.id: row for row in status.people}
    rows = connection.execute(select(member).where(member.c.project == project.id))
    members = {row.person: row for row in rows}
    people = connection.execute(select(person).where(person.c.id.in_(sorted({*worked, *members}))))
    found = [
        Colleague(
            id=row.id,
            name=row.email or pseudonym(project, row.uid),
            role=row.role,
            state=_state(members.get(row.id)),
            work=worked.get(row.id),
        )
        for row in people
    ]
    return sorted(found, key=lambda colleague: colleague.name)


def _state(member: Row[Any] | None) -> str:
    if member is None:
        return "working"
    if member.paused is not None:
        return "paused"
    return "failed the quiz" if member.passed is None and member.quiz_tries > 1 else "working"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Labels of the last days, oldest first, and when the project is done at the pace of the last seven."""

    days: tuple[int, ...]
    left: int
    days_left: float | None


def forecast(store: Store, project: Project, status: Status, days: int = 14) -> Forecast:
    """Gold and skips counted: it is about how much people do."""
    daily, today = tables.daily, store.now() // DAY_MS
    query = select(daily.c.day, daily.c.judgments).where(daily.c.project == project.id, daily.c.day > today - days)
    by_day = dict(store.read(lambda connection: connection.execute(query).all()))
    counts = [by_day.get(day, 0) for day in range(today - days + 1, today + 1)]
    pace = sum(counts[-WEEK:]) / WEEK
    return Forecast(days=tuple(counts), left=status.missing, days_left=status.missing / pace if pace else None)


def audit_rows(store: Store, most: int) -> Sequence[Any]:
    """The newest rows of the audit, with the address of who did it."""
    audit, person = tables.audit, tables.person
    query = (
        select(audit.c.seq, audit.c.at, audit.c.action, audit.c.about, person.c.email)
        .outerjoin(person, person.c.id == audit.c.who)
        .order_by(audit.c.seq.desc())
        .limit(most)
    )
    return store.read(lambda connection: connection.execute(query).all())


def export_rows(store: Store, project: Project, most: int) -> Sequence[Row[Any]]:
    """The newest exports of a project."""
    table = tables.export
    query = select(table).where(table.c.project == project.id).order_by(table.c.id.desc()).limit(most)
    return store.read(lambda connection: connection.execute(query).all())
