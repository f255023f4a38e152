"""Judgments: written once, corrected and undone by adding, checked before they are written, chained by hash."""

from __future__ import annotations

import pytest
from made_up import PLAIN, Clock, gold_pair, pair, people, project_with, ranked, step
from refused_decisions import CASES, attempt
from sqlalchemy import delete, func, select, update

from kedge.core.errors import DataError
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.audit import last_seq, tampered
from kedge.label.database import Store
from kedge.label.items import add_items
from kedge.label.judging import judge, undo
from kedge.label.projects import Project, Settings, add_guideline, find_project
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.work import Task, next_task


def leased(store: Store, project: Project, person: Person) -> Task:
    task = next_task(store, project, person)
    assert task is not None
    return task


def rows(store: Store) -> list[dict[str, object]]:
    query = select(tables.judgment).order_by(tables.judgment.c.seq)
    return store.read(lambda connection: [dict(row) for row in connection.execute(query).mappings()])


def test_the_same_decision_twice_is_one_judgment(store: Store) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    task = leased(store, project, ann)
    assert [judge(store, project, ann, task.assignment, step(2)) for _ in range(3)] == [1, 1, 1]
    assert len(rows(store)) == 1


def test_another_decision_needs_to_be_a_correction_and_supersedes(store: Store) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    task = leased(store, project, ann)
    judge(store, project, ann, task.assignment, step(2))
    with pytest.raises(DataError, match="correction"):
        judge(store, project, ann, task.assignment, step(1))
    assert judge(store, project, ann, task.assignment, step(1), corrects=True) == 2
    assert [row["supersedes"] for row in rows(store)] == [None, 1]
    assert status(store, project).given == 1


def test_outcomes_are_kept_by_answer_whatever_side_it_stood_on(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(12)])
    (ann,) = people(store, 1)
    for _ in range(12):
        task = leased(store, project, ann)
        shown = -3 if task.answers[0][0].content.startswith("first") else 3
        judge(store, project, ann, task.assignment, step(shown, axes={"honest": shown}))
    assert {(row["outcome"], str(row["axes"])) for row in rows(store)} == {(-3, "{'honest': -3}")}


def test_rankings_are_kept_by_answer(store: Store) -> None:
    project = project_with(store, [ranked(n, 4) for n in range(6)])
    (ann,) = people(store, 1)
    for _ in range(6):
        task = leased(store, project, ann)
        ranking = tuple(int(answer[0].content.split()[1]) + 1 for answer in task.answers)
        judge(store, project, ann, task.assignment, Decision(verdict="ranking", ranking=ranking))
    assert [row["ranking"] for row in rows(store)] == [[1, 2, 3, 4]] * 6


def test_an_undo_adds_a_row_and_gives_the_item_back(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    task = leased(store, project, ann)
    judge(store, project, ann, task.assignment, step(2))
    clock.advance(9)
    undo(store, ann, task.assignment)
    assert status(store, project).given == 0
    assert leased(store, project, ann).assignment == task.assignment
    judge(store, project, ann, task.assignment, step(-1))
    assert [(row["verdict"], row["supersedes"]) for row in rows(store)] == [("step", None), ("undone", 1), ("step", 2)]


def test_ten_minutes_later_nothing_is_undone(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    task = leased(store, project, ann)
    judge(store, project, ann, task.assignment, step(2))
    clock.advance(10.1)
    with pytest.raises(DataError, match="ten minutes"):
        undo(store, ann, task.assignment)


def test_an_undone_skip_counts_as_a_lease_again(store: Store) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    task = leased(store, project, ann)
    judge(store, project, ann, task.assignment, Decision(verdict="skip", reason="too long"))
    undo(store, ann, task.assignment)
    assert next_task(store, project, bob) is None


def test_a_judgment_names_the_guideline_that_was_shown(store: Store) -> None:
    project = project_with(store, [pair(0), pair(1)])
    (ann,) = people(store, 1)
    task = leased(store, project, ann)
    assert add_guideline(store, project, "Prefer what is kind.") == 2
    assert add_guideline(store, project, "Prefer what is kind.") == 2
    judge(store, project, ann, task.assignment, step(1))
    project = find_project(store, "shop")
    judge(store, project, ann, leased(store, project, ann).assignment, step(1))
    first, second = (row["guideline"] for row in rows(store))
    assert first != second == project.guideline


def test_flags_are_counted(store: Store) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    flags = {"private": "a phone number\0", "unclear": ""}
    judge(store, project, ann, leased(store, project, ann).assignment, step(1, flags=flags))
    assert status(store, project).flags == {"private": 1, "unclear": 1}


def test_gold_is_right_or_wrong(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(60)], settings=Settings(overlap_share=0, gold_share=0.5))
    add_items(store, project, [gold_pair(n) for n in range(1000, 1020)])
    ann, bob = people(store, 2)
    for person, favourite in ((ann, "first"), (bob, "second")):
        for _ in range(25):
            task = leased(store, project, person)
            is_left = task.answers[0][0].content.startswith(favourite)
            judge(store, project, person, task.assignment, step(-1 if is_left else 1))
    good, bad = status(store, project).people
    assert good.gold == good.gold_right > 0
    assert bad.gold > bad.gold_right == 0


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_decision_that_answers_something_else_is_refused_with_words(case: object) -> None:
    assert attempt(case) is None  # pyright: ignore


def test_tampering_with_judgments_and_audit_is_noticed(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(3)], settings=PLAIN)
    (ann,) = people(store, 1)
    for outcome in (1, 2, 3):
        judge(store, project, ann, leased(store, project, ann).assignment, step(outcome))
    assert tampered(store) == []
    table = tables.judgment

    def tries(statement: object) -> list[str]:
        """What is noticed of a change, which is taken back."""
        before = rows(store)
        store.write(lambda connection: connection.execute(statement))  # pyright: ignore
        problems = tampered(store)
        store.write(lambda connection: connection.execute(delete(table).where(table.c.seq == 3)))
        for row in before:
            change = update(table).where(table.c.seq == row["seq"]).values(**row)
            if store.write(lambda connection, change=change: connection.execute(change).rowcount) == 0:
                store.write(lambda connection, row=row: connection.execute(table.insert().values(**row)))
        assert tampered(store) == []
        return problems

    assert tries(update(table).where(table.c.seq == 2).values(outcome=-3)) == [
        "judgment: row 2 was changed after it was written, or the row before it"
    ]
    assert tries(delete(table).where(table.c.seq == 3)) == [
        "judgment: 2 rows are there, and 3 were written; rows at the end are gone"
    ]
    store.write(lambda connection: connection.execute(update(tables.audit).values(action="nothing")))
    assert tampered(store) == ["audit: row 1 was changed after it was written, or the row before it"]


def test_numbers_have_no_gaps(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(4)])
    (ann,) = people(store, 1)
    for _ in range(4):
        task = leased(store, project, ann)
        with pytest.raises(DataError):
            judge(store, project, ann, task.assignment, step(7))
        judge(store, project, ann, task.assignment, step(1))
    assert [row["seq"] for row in rows(store)] == [1, 2, 3, 4]
    assert store.read(lambda connection: last_seq(connection, tables.judgment)) == 4
    assert store.read(lambda connection: connection.scalar(select(func.count()).select_from(tables.judgment))) == 4
