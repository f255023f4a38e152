"""Where people disagree: what each said, and what a reviewer decides. A decision is a judgment of its own, which an
export takes in place of the votes; the votes stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sqlalchemy import Connection, Row, func, insert, select

from kedge.core.errors import DataError
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.audit import append_row, last_seq, note
from kedge.label.database import Store
from kedge.label.projects import Project
from kedge.label.questions import Decision, ItemKind, check_decision
from kedge.label.team.recent import judgments_of, recent_judgments
from kedge.label.texts import read_texts

MANY_CASES = 100
"""Disagreements that are counted; more are "and more"."""
_PART, _PARTS = 10_000, 5
"""Judgments that are looked through at a time, and how often."""
_MANY = 300
_LOOKED_AT = 500
"""Flags of all projects among which those of one are looked for."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Docket:
    """Disagreements to decide, the widest first; `count` of them are known among the judgments that were looked at."""

    cases: tuple[Case, ...]
    count: int
    is_cut: bool
    """Whether counting stopped at `MANY_CASES`."""
    looked_back_to: int
    """The number of the oldest judgment that was looked at; 0 where there is none before it."""


def read_docket(store: Store, project: Project, most: int, before: int | None = None) -> Docket:
    """What is to be decided among the newest judgments, or those up to number `before`."""

    def work(connection: Connection) -> Docket:
        start = last_seq(connection, tables.judgment) if before is None else before
        votes = _open_cases(connection, project, start)
        widest = sorted(votes, key=lambda number: -_spread(votes[number]))[:most]
        return Docket(
            cases=tuple(_case(connection, number, votes[number]) for number in widest),
            count=len(votes),
            is_cut=len(votes) >= MANY_CASES,
            looked_back_to=max(0, start - _PART * _PARTS),
        )

    return store.read(work)


def _open_cases(connection: Connection, project: Project, before: int) -> dict[int, list[Row[Any]]]:
    """Items that people disagree on and no reviewer has touched, with their votes."""
    cases: dict[int, list[Row[Any]]] = {}
    for items in _shared_items(connection, project, before):
        votes = judgments_of(connection, project, items)
        asked = _asked(connection, [row.seq for group in votes.values() for row in group if row.verdict == "skip"])
        for number, group in votes.items():
            if not any(row.verdict == "decided" or row.seq in asked for row in group) and _is_split(group):
                cases[number] = [row for row in group if row.verdict != "skip"]
        if len(cases) >= MANY_CASES:
            break
    return cases


def _shared_items(connection: Connection, project: Project, before: int) -> Iterator[list[int]]:
    """Items that several people are asked about, some hundreds at a time, from judgment `before` back."""
    seen = set[int]()
    for part in range(_PARTS):
        rows = recent_judgments(connection, project, most=_PART, before=before - part * _PART)
        items = [item for item in dict.fromkeys(row.item for row in rows if row.wanted > 1) if item not in seen]
        seen.update(items)
        for start in range(0, len(items), _MANY):
            yield items[start : start + _MANY]


def _asked(connection: Connection, skips: Sequence[int]) -> set[int]:
    """Which of these skips are questions to the guideline."""
    flag = tables.flag
    query = select(flag.c.judgment).where(flag.c.judgment.in_(skips), flag.c.kind == QUESTION)
    return set(connection.scalars(query)) if skips else set()


def _is_split(votes: Sequence[Row[Any]]) -> bool:
    """Votes for both sides, one for a side and one that both are bad, or rankings that differ."""
    sides = {(row.outcome > 0) - (row.outcome < 0) for row in votes if row.outcome is not None} - {0}
    is_bad = any(row.verdict == "both_bad" for row in votes)
    rankings = {tuple(row.ranking) for row in votes if row.ranking is not None}
    return len(sides) + is_bad > 1 or len(rankings) > 1


def _spread(votes: Sequence[Row[Any]]) -> int:
    outcomes = [row.outcome or 0 for row in votes]
    return max(outcomes) - min(outcomes)


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
