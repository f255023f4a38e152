"""What who manages a project looks at: agreement with intervals, people one by one, the forecast, the audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sqlalchemy import Connection, Row, func, select

from kedge.core.errors import DataError
from kedge.feedback import AgreementInterval, Drift, Share, agreement_interval, drift, gold_check, position_bias
from kedge.label import tables
from kedge.label.audit import last_seq
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.status import Status
from kedge.label.team.pace import DAY_MS, start_of_day
from kedge.label.team.recent import recent_judgments

_MOST_JUDGMENTS = 20_000
"""Of a big store the newest judgments are looked at: it is about how people work now."""
_MOST_COUNTED = 100_000
_DRAWS = 1000
_LATE_GOLD = 10
_FEWEST_SHARED = 10
WEEK = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Krippendorff's alpha (ordinal) of the verdict and of each axis; None where too little was labelled twice."""

    question: str
    alpha: AgreementInterval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two people, the items that both labelled, and the share on which they chose the same side."""

    first: int
    second: int
    items: int
    same: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements:
    questions: tuple[Agreement, ...]
    weeks: tuple[tuple[str, AgreementInterval | None], ...]
    """The verdict in the last four weeks, oldest first."""
    pairs: tuple[Overlap, ...]
    names: Mapping[int, str]
    judgments: int


def agreements(store: Store, project: Project) -> Agreements:
    """How far people agree; items that two or more have labelled count."""
    return store.read(lambda connection: _agreements(store, connection, project))


def _agreements(store: Store, connection: Connection, project: Project) -> Agreements:
    rows = _shared_judgments(connection, project)
    now = store.now()
    axes = sorted({name for row in rows for name in row.axes or {}})
    questions = [Agreement(question="verdict", alpha=_alpha([(row, row.outcome) for row in rows]))]
    for axis in axes:
        questions.append(Agreement(question=axis, alpha=_alpha([(row, (row.axes or {}).get(axis)) for row in rows])))
    weeks = [
        (_week_words(ago), _alpha([(row, row.outcome) for row in _of_week(rows, now, ago)])) for ago in (3, 2, 1, 0)
    ]
    people = sorted({row.person for row in rows})
    return Agreements(
        questions=tuple(questions),
        weeks=tuple(weeks),
        pairs=tuple(_pairs(rows)),
        names=_names(connection, people),
        judgments=len(rows),
    )


def _shared_judgments(connection: Connection, project: Project) -> Sequence[Row[Any]]:
    """The newest judgments with a side, of items that several people are asked about."""
    rows = recent_judgments(connection, project, most=_MOST_JUDGMENTS)
    return [row for row in rows if row.wanted > 1 and row.outcome is not None and row.verdict != "decided"]


def _week_words(ago: int) -> str:
    return ("last 7 days", "the 7 before", "2 weeks before", "3 weeks before")[ago]


def _of_week(rows: Sequence[Row[Any]], now: int, ago: int) -> list[Row[Any]]:
    begin = now - (ago + 1) * WEEK * DAY_MS
    return [row for row in rows if begin < row.at <= begin + WEEK * DAY_MS]


def _alpha(labels: Sequence[tuple[Row[Any], int | None]]) -> AgreementInterval | None:
    people = {person: place for place, person in enumerate(sorted({row.person for row, _ in labels}))}
    ratings: dict[int, list[float | None]] = {}
    prompts: dict[int, str] = {}
    for row, value in labels:
        ratings.setdefault(row.item, [None] * len(people))[people[row.person]] = value
        prompts[row.item] = row.prompt
    shared = [item for item, given in ratings.items() if sum(value is not None for value in given) > 1]
    if len(shared) < _FEWEST_SHARED:
        return None
    try:
        return agreement_interval(
            [ratings[item] for item in shared],
            level="ordinal",
            clusters=[prompts[item] for item in shared],
            draws=_DRAWS,
        )
    except DataError:  # one label alone, or one prompt: nothing to compare
        return None


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
    labels: int
    skipped: int
    hours: float
    gold: int
    gold_right: int
    accuracy: float | None
    """The mean of the gold posterior; None without gold."""
    bias: Share | None
    """P(left) − ½ with its interval."""
    drift: Drift | None
    """Gold of the last ten against that before."""
    state: str
    """invited to the quiz, failed, paused or working."""


def colleagues(store: Store, project: Project) -> list[Colleague]:
    """Everybody in a project, by name."""
    return store.read(lambda connection: _colleagues(connection, project))


def _colleagues(connection: Connection, project: Project) -> list[Colleague]:
    member, person, table = tables.member, tables.person, tables.assignment
    tallies: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in connection.execute(
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
    ):
        tallies[row.person][row.state] = row
    members = {
        row.person: row for row in connection.execute(select(member).where(member.c.project == project.id))
    }  # fmt: skip
    numbers = sorted({*tallies, *members})
    people = connection.execute(select(person).where(person.c.id.in_(numbers))).all()
    sides, golds = _sides(connection, project), _golds(connection, project)
    found = [
        _colleague(row, tallies[row.id], members.get(row.id), sides.get(row.id, (0, 0)), golds.get(row.id, []))
        for row in people
    ]
    return sorted(found, key=lambda colleague: colleague.name)


def _colleague(
    row: Row[Any], states: Mapping[str, Any], member: Row[Any] | None, sides: tuple[int, int], golds: Sequence[bool]
) -> Colleague:
    done = states.get("done")
    gold, right = (int(done.gold), int(done.right or 0)) if done is not None else (0, 0)
    return Colleague(
        id=row.id,
        name=row.email or f"forgotten {row.uid[:6]}",
        role=row.role,
        labels=(done.count if done is not None else 0) - gold,
        skipped=states["skipped"].count if "skipped" in states else 0,
        hours=sum(float(state.seconds or 0) for state in states.values()) / 3600,
        gold=gold,
        gold_right=right,
        accuracy=gold_check(right, gold).accuracy if gold else None,
        bias=position_bias(*sides) if sum(sides) >= _FEWEST_SHARED else None,
        drift=drift(golds, late=_LATE_GOLD) if len(golds) >= 2 * _LATE_GOLD else None,
        state=_state(member),
    )


def _state(member: Row[Any] | None) -> str:
    if member is None:
        return "working"
    if member.paused is not None:
        return "paused"
    return "failed the quiz" if member.passed is None and member.quiz_tries > 1 else "working"


def _sides(connection: Connection, project: Project) -> dict[int, tuple[int, int]]:
    """How often each person chose the left and the right side, as they saw them, in the newest judgments."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row in recent_judgments(connection, project, most=_MOST_JUDGMENTS):
        if row.verdict == "step" and row.outcome:
            shown = -row.outcome if list(row.order) == [1, 0] else row.outcome
            counts[row.person][shown > 0] += 1
    return {person: (left, right) for person, (left, right) in counts.items()}


def _golds(connection: Connection, project: Project) -> dict[int, list[bool]]:
    """Whether each person was right on gold, in the order in which they judged, in the newest judgments."""
    table, judgment = tables.assignment, tables.judgment
    query = (
        select(table.c.person, table.c.is_right)
        .join(judgment, judgment.c.assignment == table.c.id)
        .where(
            judgment.c.seq > last_seq(connection, judgment) - _MOST_JUDGMENTS,
            table.c.project + 0 == project.id,
            table.c.state == "done",
            table.c.is_right.is_not(None),
        )
        .order_by(judgment.c.seq)
    )
    outcomes: dict[int, list[bool]] = defaultdict(list)
    for row in connection.execute(query):
        outcomes[row.person].append(bool(row.is_right))
    return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Labels of the last days, oldest first, and when the project is done at the pace of the last seven."""

    days: tuple[int, ...]
    left: int
    days_left: float | None


def forecast(store: Store, project: Project, status: Status, days: int = 14) -> Forecast:
    """Gold and skips counted: it is about how much people do. Of a big store the newest judgments are counted."""
    judgment, assignment = tables.judgment, tables.assignment
    midnight = start_of_day(store.now())
    begin = midnight - (days - 1) * DAY_MS

    def work(connection: Connection) -> list[int]:
        first = last_seq(connection, judgment) - _MOST_COUNTED
        query = (
            select(judgment.c.at)
            .join(assignment, assignment.c.id == judgment.c.assignment)
            .where(
                judgment.c.seq > first,
                judgment.c.at >= begin,
                judgment.c.verdict.not_in(("undone", "decided")),
                assignment.c.project + 0 == project.id,
            )
        )
        counts = [0] * days
        for at in connection.scalars(query):
            counts[min(days - 1, (at - begin) // DAY_MS)] += 1
        return counts

    counts = store.read(work)
    left = max(0, status.wanted - status.given)
    pace = sum(counts[-WEEK:]) / WEEK
    return Forecast(days=tuple(counts), left=left, days_left=left / pace if pace else None)


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
