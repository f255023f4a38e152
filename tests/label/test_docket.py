"""What is kept beside the judgments is what follows from them, whatever was judged, corrected, undone and decided."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest
from made_up import Clock, gold_pair, pair, people, project_with, ranked, step
from sqlalchemy import delete, select

from kedge.label import tables
from kedge.label.accounts import Person, add_person
from kedge.label.database import Store
from kedge.label.docket import DAY_MS
from kedge.label.judging import judge, undo
from kedge.label.migrations.versions.r0004_docket import fill
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.team.members import add_member, pause_if_careless, set_pause
from kedge.label.team.overview import forecast
from kedge.label.team.review import ask_for_guideline, decide, read_docket
from kedge.label.work import next_task


def any_decision(chance: Random, kind: str, count: int) -> Decision:
    if chance.random() < 0.15:
        return Decision(verdict="skip", reason="unclear")
    if kind == "rank":
        return Decision(verdict="ranking", ranking=tuple(chance.choices(range(1, count + 1), k=count)))
    return Decision(verdict="both_bad") if chance.random() < 0.2 else step(chance.choice([-3, -1, 0, 1, 1, 2]))


def live(store: Store, clock: Clock, seed: int) -> tuple[Project, Person]:
    """Days of four people on 24 items, with second thoughts, and a reviewer now and then."""
    chance = Random(seed)
    settings = Settings(wanted=3, overlap_share=0, gold_share=0.2, repeat_share=0.1)
    drafts = [
        *(pair(n) for n in range(18)),
        *(ranked(100 + n) for n in range(6)),
        *(gold_pair(50 + n) for n in range(6)),
    ]
    project = project_with(store, drafts, settings=settings)
    reviewer, crowd = add_person(store, "chief@example.org", "manager"), people(store, 4)
    for _ in range(110):
        clock.advance(chance.choice([1, 30, 600]))
        person = chance.choice(crowd)
        if (task := next_task(store, project, person)) is None:
            continue
        decision = any_decision(chance, task.kind, len(task.answers))
        judge(store, project, person, task.assignment, decision)
        match chance.randrange(16):
            case 0 | 1:
                undo(store, person, task.assignment)
            case 2 | 3:
                again = any_decision(chance, task.kind, len(task.answers))
                judge(store, project, person, task.assignment, again, corrects=True)
            case 4 if cases := read_docket(store, project, 3).cases:
                case = chance.choice(cases)
                if chance.random() < 0.5:
                    ask_for_guideline(store, project, reviewer, case.key, "what if both are true?")
                else:
                    ruling = step(1) if case.kind == "pair" else Decision(verdict="ranking", ranking=(1, 2, 3))
                    decide(store, project, reviewer, case.key, ruling)
            case _:
                pass
    return project, reviewer


def kept(store: Store) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    def work(connection: Any) -> tuple[list[Any], list[Any]]:
        docket = connection.execute(select(tables.docket).order_by(tables.docket.c.item))
        daily = connection.execute(select(tables.daily).order_by(tables.daily.c.day))
        return [tuple(row) for row in docket], [tuple(row) for row in daily]

    return store.read(work)


def from_scratch(store: Store) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The same from all judgments, one by one."""
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    query = (
        select(judgment, assignment.c.item, item.c.is_gold, item.c.repeats, item.c.project)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .order_by(judgment.c.seq)
    )
    rows = store.read(lambda connection: connection.execute(query).all())
    asked = set(
        store.read(lambda c: c.scalars(select(tables.flag.c.judgment).where(tables.flag.c.kind == "guideline")))
    )
    superseded = {row.supersedes for row in rows}
    days = Counter((row.project, row.at // DAY_MS) for row in rows if row.verdict not in ("undone", "decided"))
    votes: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in rows:
        if row.seq not in superseded and row.verdict != "undone" and not row.is_gold and row.repeats is None:
            votes[row.item, row.project].append(row)
    docket = list[tuple[Any, ...]]()
    for (number, project), own in sorted(votes.items()):
        said = {"left" if row.outcome < 0 else "right" for row in own if row.outcome}
        said |= {"bad" for row in own if row.verdict == "both_bad"}
        is_split = len(said) > 1 or len({tuple(row.ranking) for row in own if row.ranking}) > 1
        if is_split and not any(row.verdict == "decided" or row.seq in asked for row in own):
            steps = [row.outcome or 0 for row in own if row.verdict != "skip"]
            docket.append((number, project, True, max(steps) - min(steps), None))
    return docket, [(*key, count) for key, count in sorted(days.items())]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_what_all_judgments_say(store: Store, clock: Clock, seed: int) -> None:
    project, _ = live(store, clock, seed)
    docket, daily = kept(store)
    assert (docket, daily) == from_scratch(store)
    assert docket
    assert len(daily) > 5
    assert read_docket(store, project, 0).disagreements == len(docket)
    ahead = forecast(store, project, status(store, project), days=60)
    assert sum(ahead.days) == sum(count for _, _, count in daily)
    assert ahead.days[-1] == daily[-1][2]


def test_a_store_from_before_gets_the_same(store: Store, clock: Clock) -> None:
    live(store, clock, 5)
    before = kept(store)
    store.write(lambda c: [c.execute(delete(table)) for table in (tables.docket, tables.daily)])
    store.write(fill)
    assert kept(store) == before


def test_the_widest_disagreements_come_first_and_can_be_left_for_later(store: Store, clock: Clock) -> None:
    project, _ = live(store, clock, 1)
    whole = read_docket(store, project, 100)
    spreads = [max(v.outcome or 0 for v in c.votes) - min(v.outcome or 0 for v in c.votes) for c in whole.cases]
    assert spreads == sorted(spreads, reverse=True)
    assert len(whole.cases) == whole.disagreements > 4
    assert read_docket(store, project, 2, skip=2).cases == whole.cases[2:4]


def careless(store: Store) -> tuple[Project, Person, list[str]]:
    """Somebody who is right on twelve gold items and then wrong on the rest, and what they labelled since the last good
    eight, by assignment."""
    settings = Settings(wanted=1, overlap_share=0, gold_share=0.3, repeat_share=0)
    drafts = [*(pair(n) for n in range(80)), *(gold_pair(1000 + n) for n in range(40))]
    project = project_with(store, drafts, settings=settings)
    (person,) = people(store, 1)
    add_member(store, project, person)
    outcomes, since = list[bool](), list[str]()
    while not pause_if_careless(store, project, person):
        task = next_task(store, project, person)
        assert task is not None
        word, _, number = task.answers[0][0].content.split()
        is_gold, is_right = int(number) >= 1000, len(outcomes) < 12
        judge(store, project, person, task.assignment, step(-2 if (word == "first") == is_right else 2))
        if is_gold:
            outcomes.append(is_right)
            since = [] if sum(outcomes[-8:]) >= 6 else since
        else:
            since.append(task.assignment)
    return project, person, since


def test_labels_since_the_last_good_gold_go_to_review_when_a_person_is_paused(store: Store) -> None:
    project, person, since = careless(store)
    assignment = tables.assignment
    query = select(assignment.c.item).where(assignment.c.id.in_(since)).order_by(assignment.c.item)
    items = list(store.read(lambda connection: connection.scalars(query).all()))
    assert 4 <= len(items) < 40
    assert kept(store)[0] == [(item, project.id, False, 0, person.id) for item in items]
    docket = read_docket(store, project, 1)
    assert (docket.disagreements, docket.doubted) == (0, len(items))
    assert [vote.is_doubted for vote in docket.cases[0].votes] == [True]
    chief = add_person(store, "chief@example.org", "manager")
    decide(store, project, chief, docket.cases[0].key, step(1))
    set_pause(store, project, person.id, paused=False, who=chief.id)
    assert read_docket(store, project, 0).doubted == len(items) - 1  # to go on does not make them right
    set_pause(store, project, person.id, paused=True, who=chief.id)
    assert read_docket(store, project, 0).doubted == len(items) - 1  # what was decided stays decided


def test_of_who_has_had_no_gold_nothing_is_doubted(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(6)])
    (person,) = people(store, 1)
    add_member(store, project, person)
    while (task := next_task(store, project, person)) is not None:
        judge(store, project, person, task.assignment, step(2))
    set_pause(store, project, person.id, paused=True, who=None)
    assert read_docket(store, project, 5).count == 0


def test_a_doubted_label_that_is_taken_back_is_off_the_docket(store: Store) -> None:
    project, person, since = careless(store)
    before = read_docket(store, project, 0).doubted
    undo(store, person, since[-1])
    assert read_docket(store, project, 0).doubted == before - 1
