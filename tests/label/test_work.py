"""The queue: who gets which item, for how long, and what the reply does not say."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict

import pytest
from made_up import PLAIN, Clock, gold_pair, pair, people, project_with, ranked, says, step

from kedge.core.errors import DataError
from kedge.label.accounts import add_person, forget
from kedge.label.database import Store
from kedge.label.incoming import Draft
from kedge.label.items import add_items
from kedge.label.judging import judge
from kedge.label.projects import Settings
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.work import give_back, next_task


def question(task: object) -> str:
    return getattr(task, "prompt")[0].content  # noqa: B009


def test_items_come_by_priority_then_in_their_order(store: Store) -> None:
    project = project_with(store, [pair(0), pair(1, priority=5.0), pair(2)])
    (person,) = people(store, 1)
    order: list[str] = []
    while (task := next_task(store, project, person)) is not None:
        order.append(question(task))
        judge(store, project, person, task.assignment, step(1))
    assert order == ["question 1", "question 0", "question 2"]


def test_a_lease_is_nobody_elses_and_comes_again_to_its_person(store: Store) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    first, again = next_task(store, project, ann), next_task(store, project, ann)
    assert first is not None
    assert again is not None
    assert first.assignment == again.assignment
    assert next_task(store, project, bob) is None


def test_a_lease_ends_after_thirty_minutes(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    held = next_task(store, project, ann)
    clock.advance(29)
    assert next_task(store, project, bob) is None
    clock.advance(2)
    taken = next_task(store, project, bob)
    assert held is not None
    assert taken is not None
    assert taken.assignment != held.assignment
    assert next_task(store, project, ann) is None


def test_a_judgment_that_comes_after_the_lease_is_kept(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    task = next_task(store, project, ann)
    assert task is not None
    clock.advance(31)
    other = next_task(store, project, bob)
    assert other is not None
    assert judge(store, project, ann, task.assignment, step(1)) == 1
    assert judge(store, project, bob, other.assignment, step(1)) == 2
    assert status(store, project).given == 2


def test_a_returned_item_goes_to_others_and_may_come_back(store: Store) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    task = next_task(store, project, ann)
    assert task is not None
    give_back(store, ann, task.assignment)
    other = next_task(store, project, bob)
    assert other is not None
    give_back(store, bob, other.assignment)
    again = next_task(store, project, ann)
    assert again is not None
    assert again.assignment == task.assignment


def test_overlap_gives_items_to_so_many_different_people(store: Store) -> None:
    project = project_with(store, [pair(0)], settings=Settings(overlap_share=0.99, overlap_wanted=3, gold_share=0))
    crowd = people(store, 5)
    tasks = [next_task(store, project, person) for person in crowd]
    assert [task is not None for task in tasks] == [True, True, True, False, False]
    for person, task in zip(crowd, tasks, strict=True):
        if task is not None:
            judge(store, project, person, task.assignment, step(1))
    assert [next_task(store, project, person) for person in crowd] == [None] * 5


def test_the_share_of_overlap_is_as_asked(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(500)], settings=Settings(overlap_share=0.2, gold_share=0))
    now = status(store, project)
    shared = (now.wanted - now.items) / 2
    assert 70 <= shared <= 130


def test_a_skipped_item_goes_to_others_and_never_back(store: Store) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    task = next_task(store, project, ann)
    assert task is not None
    judge(store, project, ann, task.assignment, Decision(verdict="skip", reason="I do not know this"))
    assert next_task(store, project, ann) is None
    assert next_task(store, project, bob) is not None


def test_gold_has_its_share_and_its_reply_looks_like_any_other(store: Store) -> None:
    settings = Settings(overlap_share=0, gold_share=0.2)
    project = project_with(store, [pair(n) for n in range(80)], settings=settings)
    add_items(store, project, [gold_pair(n) for n in range(1000, 1100)])
    (person,) = people(store, 1)
    golden, shapes = 0, Counter[str]()
    while (task := next_task(store, project, person)) is not None:
        golden += int(question(task).split()[1]) >= 1000
        shapes[re.sub(r"[0-9a-f]{32}|\d+|first|second", "", str(asdict(task)))] += 1
        judge(store, project, person, task.assignment, step(-1))
    assert 8 <= golden <= 40
    assert len(shapes) == 1, "a gold reply has other fields or words than an ordinary one"
    assert "gold" not in next(iter(shapes))
    assert "secret-model" not in next(iter(shapes))


def test_gold_does_not_come_when_nothing_else_is_left(store: Store) -> None:
    project = project_with(store, [gold_pair(0)], settings=Settings(gold_share=0.5))
    (person,) = people(store, 1)
    assert [next_task(store, project, person) for _ in range(20)] == [None] * 20


def test_sides_are_drawn_anew_for_each_person(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(40)])
    (person,) = people(store, 1)
    left = 0
    for _ in range(40):
        task = next_task(store, project, person)
        assert task is not None
        left += task.answers[0][0].content.startswith("first")
        judge(store, project, person, task.assignment, step(0))
    assert 8 <= left <= 32


def test_ids_are_random_and_of_128_bits(store: Store) -> None:
    project = project_with(store, [pair(0), pair(1)])
    ids = [next_task(store, project, person) for person in people(store, 2)]
    numbers = [int(task.assignment, 16) for task in ids if task is not None]
    assert len(set(numbers)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", task.assignment) for task in ids if task is not None)


def test_languages_and_harm_are_for_those_who_take_them(store: Store) -> None:
    project = project_with(store, [pair(0, language="de"), pair(1, is_harmful=True)])
    ann = add_person(store, "ann@example.org", languages=["en"])
    assert next_task(store, project, ann) is None
    bob = add_person(store, "bob@example.org", languages=["de"], takes_harm=True)
    assert next_task(store, project, bob) is not None


def test_an_assignment_of_another_is_as_unknown_as_one_that_is_not_there(store: Store) -> None:
    project = project_with(store, [pair(0)])
    ann, bob = people(store, 2)
    task = next_task(store, project, ann)
    assert task is not None
    messages: list[str] = []
    for assignment in (task.assignment, "0" * 32):
        with pytest.raises(DataError) as refused:
            judge(store, project, bob, assignment, step(1))
        messages.append(str(refused.value))
    assert messages == ["there is no such assignment"] * 2


def test_who_was_forgotten_gets_nothing(store: Store) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    forget(store, "person0@example.org")
    with pytest.raises(DataError, match="no account"):
        next_task(store, project, ann)


def test_an_item_is_asked_as_its_answers_are_many(store: Store) -> None:
    prompt = Draft(prompt=says("user", "write a poem"))
    project = project_with(store, [pair(0), ranked(1), prompt], settings=PLAIN)
    kinds: list[str] = []
    for person in people(store, 3):
        task = next_task(store, project, person)
        assert task is not None
        kinds.append(task.kind)
    assert kinds == ["pair", "rank", "write"]
