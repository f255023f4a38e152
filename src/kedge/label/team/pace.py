"""How much one person has done, and how fast: what they may know of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import Connection, Exists, func, select

from kedge.feedback import Share
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.database import Store
from kedge.label.docket import DAY_MS
from kedge.label.projects import Project
from kedge.label.repeats import self_agreements
from kedge.label.work import LEASE_MS

_GRACE_MS = 5000
"""The clocks of page and server need not agree to the second."""
_RECENT = 500


def start_of_day(now: int) -> int:
    """Midnight (UTC)."""
    return now - now % DAY_MS


def labels_today(store: Store, project: Project, person: Person) -> int:
    """Judgments since midnight that stand, gold among them: the number must not tell which were gold."""
    return len(_judgments(store, project, person, since=start_of_day(store.now())))


def _judgments(store: Store, project: Project, person: Person, since: int) -> Sequence[tuple[int, float]]:
    """Time and seconds of a person's judgments that nothing supersedes, oldest first."""
    judgment, assignment = tables.judgment, tables.assignment
    query = (
        select(judgment.c.at, judgment.c.seconds)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .where(
            assignment.c.project == project.id,
            assignment.c.person == person.id,
            assignment.c.state.in_(("done", "skipped")),
            judgment.c.at >= since,
            judgment.c.verdict.not_in(("undone", "decided")),
            ~_is_superseded(),
        )
        .order_by(judgment.c.seq)
    )
    return store.read(lambda connection: [(row.at, row.seconds) for row in connection.execute(query)])


def _is_superseded() -> Exists:
    later = tables.judgment.alias("later")
    return select(later.c.seq).where(later.c.supersedes == tables.judgment.c.seq).exists()


def shown_for(store: Store, person: Person, assignment: str) -> float:
    """Seconds since an item was shown to its person last; of another's, none."""
    table = tables.assignment
    query = select(table.c.leased_until, table.c.seconds).where(
        table.c.id == assignment, table.c.person == person.id
    )  # fmt: skip
    row = store.read(lambda connection: connection.execute(query).first())
    if row is None:
        return 0.0
    since = row.leased_until - LEASE_MS if row.leased_until else store.now() - LEASE_MS
    return max(0, min(store.now() - since, LEASE_MS) + _GRACE_MS) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One person's work in a project. Gold is that of former days: today's would give away which items are gold."""

    today: int
    week: tuple[int, ...]
    """Labels a day, oldest first, today last."""
    total: int
    hours: float
    median_seconds: float | None
    gold: int
    gold_right: int
    again: Share | None
    """The share of repeated items with the same verdict."""


def pace(store: Store, project: Project, person: Person) -> Pace:
    midnight = start_of_day(store.now())
    recent = _judgments(store, project, person, since=midnight - 6 * DAY_MS)
    week = [0] * 7
    for at, _ in recent:
        week[min(6, max(0, 6 + (at - midnight) // DAY_MS))] += 1
    seconds = [value for _, value in recent[-_RECENT:] if value > 0]

    def totals(connection: Connection) -> tuple[int, float, int, int]:
        return _totals(connection, project, person, midnight)

    total, hours, gold, right = store.read(totals)
    again = store.read(lambda connection: self_agreements(connection, project)).get(person.id)
    return Pace(
        today=week[6],
        week=tuple(week),
        total=total,
        hours=hours,
        median_seconds=median(seconds) if seconds else None,
        gold=gold,
        gold_right=right,
        again=again,
    )


def _totals(connection: Connection, project: Project, person: Person, midnight: int) -> tuple[int, float, int, int]:
    table, judgment = tables.assignment, tables.judgment
    mine = (table.c.project == project.id, table.c.person == person.id)
    done = select(func.count(), func.sum(table.c.seconds)).where(*mine, table.c.state.in_(("done", "skipped")))
    practised = select(func.sum(table.c.seconds)).where(*mine, table.c.state == "practised")
    count, seconds = connection.execute(done).one()
    extra = connection.scalar(practised) or 0
    gold = (
        select(func.count(table.c.is_right), func.sum(table.c.is_right))
        .select_from(table)
        .join(judgment, judgment.c.assignment == table.c.id)
        .where(*mine, table.c.state == "done", table.c.is_right.is_not(None), judgment.c.at < midnight)
        .where(~_is_superseded())
    )
    seen, right = connection.execute(gold).one()
    return int(count or 0), (float(seconds or 0) + float(extra)) / 3600, int(seen or 0), int(right or 0)
