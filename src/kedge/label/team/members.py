"""Who works in a project, and what stands before the queue: the quiz, practice, a pause.

Practice is on gold, with its explanation afterwards; what was practised on never comes again to the same person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from sqlalchemy import Connection, func, select, update

from kedge.core.errors import DataError
from kedge.feedback import gold_check
from kedge.label import tables
from kedge.label.accounts import Person, add_person, find_person, new_bearer, put_member
from kedge.label.audit import note
from kedge.label.care import items_since_good_gold
from kedge.label.database import Store
from kedge.label.docket import doubt
from kedge.label.judging import is_right
from kedge.label.projects import Project, all_projects, read_guideline
from kedge.label.questions import Decision, ItemKind, check_decision, to_places
from kedge.label.team.quiz import TRIES, split_quiz
from kedge.label.work import Task, fits, gold_from, lease, own_assignment, read_task

Step = Literal["quiz", "failed", "practice", "paused", "work"]
LOCAL = "you@localhost"
HOUR_MS = 3600 * 1000
_PRACTICE, _PRACTISED = "practice", "practised"
_SEE_ALL = ("owner",)


def projects_of(store: Store, person: Person) -> list[Project]:
    """The projects that a person may see: those they were invited to; owners see all."""
    projects = all_projects(store)
    if person.role in _SEE_ALL:
        return projects
    table = tables.member
    query = select(table.c.project).where(table.c.person == person.id)
    mine = set(store.read(lambda connection: connection.scalars(query).all()))
    return [project for project in projects if project.id in mine]


def add_member(store: Store, project: Project, person: Person) -> None:
    """Let a person with an account work in one more project."""
    store.write(lambda connection: put_member(store, connection, project.id, person.id))


def step_of(store: Store, project: Project, person: Person) -> Step:
    """What a person does next; machines and owners need neither quiz nor practice."""
    if person.role in ("machine", "owner"):
        return "work"
    row = store.read(lambda connection: _member(connection, project, person))
    if row is None:
        raise DataError("there is no such project")
    _, quiz = split_quiz(read_guideline(store, project.guideline))
    if row.passed is None and quiz:
        return "failed" if row.quiz_tries >= TRIES else "quiz"
    if row.paused is not None:
        return "paused"
    done, wanted = practice_progress(store, project, person)
    return "practice" if done < wanted else "work"


def _member(connection: Connection, project: Project, person: Person) -> Any:
    table = tables.member
    mine = select(table).where(table.c.project == project.id, table.c.person == person.id)
    return connection.execute(mine).first()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuizResult:
    right: int
    questions: int
    passed: bool
    tries_left: int


def take_quiz(store: Store, project: Project, person: Person, answers: Sequence[int]) -> QuizResult:
    """One try; all answers must be right. Two tries, then a manager decides."""
    _, quiz = split_quiz(read_guideline(store, project.guideline))
    if len(answers) != len(quiz):
        raise DataError(f"answers: found {len(answers)}; the quiz has {len(quiz)} questions")
    right = sum(answer == question.right for answer, question in zip(answers, quiz, strict=True))
    passed = right == len(quiz)

    def work(connection: Connection) -> int:
        table = tables.member
        row = _member(connection, project, person)
        if row is None or row.passed is not None or row.quiz_tries >= TRIES:
            raise DataError("the quiz is not open; ask who invited you")
        tries = row.quiz_tries + 1
        values = {"quiz_tries": tries, "passed": store.now() if passed else None}
        mine = update(table).where(table.c.project == project.id, table.c.person == person.id)
        connection.execute(mine.values(**values))
        about = {"project": project.name, "right": right, "of": len(quiz), "guideline": project.guideline}
        note(store, connection, "quiz", about, who=person.id)
        return TRIES - tries

    left = store.write(work)
    return QuizResult(right=right, questions=len(quiz), passed=passed, tries_left=left)


def practice_progress(store: Store, project: Project, person: Person) -> tuple[int, int]:
    """How many items a person has practised on, and how many are wanted: at most half of the gold, which must last."""
    item, assignment = tables.item, tables.assignment

    def work(connection: Connection) -> tuple[int, int]:
        golds = connection.scalar(
            select(func.count()).select_from(item).where(item.c.project == project.id, item.c.is_gold, *fits(person))
        )
        mine = select(func.count()).where(
            assignment.c.project == project.id, assignment.c.person == person.id, assignment.c.state == _PRACTISED
        )
        return connection.scalar(mine) or 0, min(project.settings.practice, (golds or 0) // 2)

    return store.read(work)


def next_practice(store: Store, project: Project, person: Person) -> Task | None:
    """A gold item to practise on; the one that was begun comes again. None: enough."""
    done, wanted = practice_progress(store, project, person)
    if done >= wanted:
        return None

    def work(connection: Connection) -> Task | None:
        table = tables.assignment
        begun = connection.scalar(
            select(table.c.id).where(
                table.c.project == project.id, table.c.person == person.id, table.c.state == _PRACTICE
            )
        )
        if begun is not None:
            return read_task(connection, project, begun)
        gold = gold_from(connection, project, person, store.token())
        if gold is None:
            return None
        return read_task(connection, project, lease(store, connection, project, person, gold, _PRACTICE))

    return store.write(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What is said after practice. `expected` is in the order in which the answers were shown."""

    is_right: bool
    expected: int | tuple[int, ...]
    explanation: str | None


def practise(store: Store, project: Project, person: Person, assignment: str, decision: Decision) -> Feedback:
    """Compare a decision with the gold one; no judgment is kept, the time is."""

    def work(connection: Connection) -> Feedback:
        row = own_assignment(connection, person, assignment)
        if row.state not in (_PRACTICE, _PRACTISED):
            raise DataError("this is no practice")
        order = cast(Sequence[int], row.order)
        check_decision(decision, cast(ItemKind, row.kind), project.questions, len(order))
        gold = connection.execute(select(tables.gold).where(tables.gold.c.item == row.item)).one()
        outcome, ranking, _ = to_places(decision, order)
        right = is_right(outcome, ranking, expected=gold.expected, tolerance=gold.tolerance)
        table = tables.assignment
        values = {"state": _PRACTISED, "is_right": int(right), "seconds": row.seconds + decision.seconds}
        if row.state == _PRACTICE:
            connection.execute(update(table).where(table.c.id == row.id).values(**values))
        return Feedback(is_right=right, expected=_shown(gold.expected, order), explanation=gold.explanation)

    return store.write(work)


def _shown(expected: int | Sequence[int], order: Sequence[int]) -> int | tuple[int, ...]:
    """
    >>> _shown(-2, [1, 0]), _shown([1, 2, 3], [2, 0, 1])
    (2, (3, 1, 2))
    """
    if isinstance(expected, int):
        return -expected if tuple(order) == (1, 0) else expected
    return tuple(expected[place] for place in order)


def pause_if_careless(store: Store, project: Project, person: Person) -> bool:
    """Pause a person whose gold says that they are below 75 % (with 95 %, after 8); labels stay, and go to review."""
    if person.role in ("machine", "owner"):
        return False

    def look(connection: Connection) -> bool:
        seen, right = gold_counts(connection, project, person.id)
        row = _member(connection, project, person)
        if row is None or row.paused is not None:
            return False
        return gold_check(right - row.gold_right, seen - row.gold_seen).pause

    if not store.read(look):
        return False
    set_pause(store, project, person.id, paused=True, who=None)
    return True


def gold_counts(connection: Connection, project: Project, person: int) -> tuple[int, int]:
    """How much gold a person has judged, and how much of it rightly."""
    table = tables.assignment
    row = connection.execute(
        select(func.count(table.c.is_right), func.sum(table.c.is_right)).where(
            table.c.project == project.id, table.c.person == person, table.c.state == "done"
        )
    ).one()
    return int(row[0] or 0), int(row[1] or 0)


def set_pause(store: Store, project: Project, person: int, *, paused: bool, who: int | None) -> None:
    """Pause somebody: what they labelled since their last good block of gold goes to review. Or let them go on: gold up
    to now then counts no more, and the quiz may be taken again."""

    def work(connection: Connection) -> None:
        table = tables.member
        seen, right = gold_counts(connection, project, person)
        resumed = {"paused": None, "gold_seen": seen, "gold_right": right, "quiz_tries": 0}
        changed = connection.execute(
            update(table)
            .where(table.c.project == project.id, table.c.person == person)
            .values(**({"paused": store.now()} if paused else resumed))
        )
        if not changed.rowcount:
            raise DataError("there is no such person in this project")
        about: dict[str, Any] = {"project": project.name, "person": person}
        if paused:
            about["to_review"] = doubt(connection, person, items_since_good_gold(connection, project, person))
        note(store, connection, "pause" if paused else "resume", about, who=who)

    store.write(work)


def may_take_harm(store: Store, project: Project, person: Person) -> Person:
    """The person as the queue sees them now: who has had as many harmful items in this hour as are good gets others."""
    if not person.takes_harm:
        return person
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    query = (
        select(func.count())
        .select_from(judgment)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .where(assignment.c.person == person.id, item.c.is_harmful, judgment.c.at > store.now() - HOUR_MS)
    )
    count = store.read(lambda connection: connection.scalar(query)) or 0
    return person if count < project.settings.harm_an_hour else replace(person, takes_harm=False)


def set_preferences(store: Store, person: Person, *, takes_harm: bool, languages: Sequence[str]) -> None:
    """What a person chooses for themselves: harmful items or not, and their languages."""
    values = {"takes_harm": takes_harm, "languages": list(languages)}

    def work(connection: Connection) -> None:
        connection.execute(update(tables.person).where(tables.person.c.id == person.id).values(**values))
        note(store, connection, "preferences", {"takes_harm": takes_harm}, who=person.id)

    store.write(work)


def local_person(store: Store) -> Person:
    """The one person of a store that is used on this machine alone."""
    try:
        return find_person(store, LOCAL)
    except DataError:
        return add_person(store, LOCAL, "owner")


def machine_token(store: Store, project: Project, email: str) -> str:
    """A new token for a machine that labels in a project; its account is made where there is none."""
    try:
        machine = find_person(store, email)
    except DataError:
        machine = add_person(store, email, "machine")
    token = new_bearer(store, machine)
    add_member(store, project, machine)
    return token
