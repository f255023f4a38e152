"""What a status says of people who do not look, of agreement, pay and what to do; and the session it leads to."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from made_up import Clock, gold_pair, pair, people, project_with, step

from kedge.core.errors import DataError
from kedge.feedback import agreement_interval, krippendorff_alpha
from kedge.label.accounts import Person
from kedge.label.agreement import read_agreement
from kedge.label.database import Store
from kedge.label.items import add_items
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.status import Status, status
from kedge.label.team.calibrate import calibrate
from kedge.label.work import next_task

Decide = Callable[[int, bool, int], Decision]
"""The number of an item, whether its first answer stands left, and how many the person has labelled."""


def work(store: Store, project: Project, person: Person, decide: Decide, *, clock: Clock | None = None) -> None:
    done = 0
    while (task := next_task(store, project, person)) is not None:
        word, _, number = task.answers[0][0].content.split()
        judge(store, project, person, task.assignment, decide(int(number), word == "first", done))
        done += 1
        if clock is not None:
            clock.advance(1)


def better(number: int, first_stands_left: bool, *, seconds: float = 12.5) -> Decision:
    """The first answer is the better one of even items."""
    is_left = first_stands_left == (number % 2 == 0)
    return Decision(verdict="step", outcome=-2 if is_left else 2, seconds=seconds)


def careful(number: int, left: bool, done: int) -> Decision:
    return better(number, left)


def always_left(number: int, left: bool, done: int) -> Decision:
    return step(-1)


def in_a_rush(number: int, left: bool, done: int) -> Decision:
    return better(number, left, seconds=0.05)


def tired(number: int, left: bool, done: int) -> Decision:
    """Right at first, then a coin."""
    coin = Random(number)
    return better(number, left) if done < 70 or coin.random() < 0.4 else better(number + 1, left)


CASES: dict[str, tuple[Decide, tuple[str, ...]]] = {
    "careful": (careful, ()),
    "always left": (always_left, ("prefers a side", "a run of 120 times left")),
    "in a rush": (in_a_rush, ("faster than 1,000 words a minute",)),
    "tired": (tired, ("drifts: agrees with others",)),
}


@pytest.mark.parametrize("name", CASES)
def test_who_does_not_look_is_told(store: Store, name: str) -> None:
    decide, worries = CASES[name]
    settings = Settings(wanted=3, overlap_share=0, gold_share=0)
    project = project_with(store, [pair(n) for n in range(120)], settings=settings)
    ann, bob, eve = people(store, 3)
    work(store, project, ann, careful)
    work(store, project, bob, careful)
    work(store, project, eve, decide)
    lines = [line for line in status(store, project).next_steps() if "person" in line]
    assert all(line.startswith("person2@") for line in lines)
    assert bool(lines) == bool(worries)
    assert all(any(worry in line for line in lines) for worry in worries)


def test_who_fails_on_gold_is_paused_and_the_labels_to_review_are_counted(store: Store) -> None:
    project = project_with(
        store,
        [pair(n) for n in range(60)] + [gold_pair(1000 + 2 * n) for n in range(40)],
        settings=Settings(wanted=1, overlap_share=0, gold_share=0.3),
    )
    (ann,) = people(store, 1)
    work(store, project, ann, lambda number, left, done: better(number + (done >= 30), left))
    (line,) = [line for line in status(store, project).next_steps() if "pause" in line]
    count = int(line.split("review the ")[1].split()[0])
    assert 20 <= count <= 45


def test_alpha_is_that_of_the_statistics(store: Store) -> None:
    project = project_with(
        store, [pair(n) for n in range(30)], settings=Settings(wanted=3, overlap_share=0, gold_share=0)
    )
    add_items(store, project, [pair(n, round=1) for n in range(10)])  # the same prompts again
    chance, table = Random(5), dict[tuple[int, int], dict[int, int]]()
    for person in people(store, 3):

        def decide(number: int, left: bool, done: int, who: int = person.id) -> Decision:
            outcome = chance.choice([-3, -2, -1, 0, 1, 2, 3]) if chance.random() < 0.5 else 1 + number % 3
            again = 1 if (number, 0) in table and who in table[number, 0] else 0
            table.setdefault((number, again), {})[who] = outcome
            return step(outcome if left else -outcome)

        work(store, project, person, decide)
    found = store.read(lambda connection: read_agreement(connection, project))["pair"]
    ratings = [list(row.values()) for row in table.values()]
    assert found.alpha == pytest.approx(krippendorff_alpha(ratings, level="ordinal"), abs=1e-12)
    whole = agreement_interval(ratings, level="ordinal", clusters=[number for number, _ in table])
    assert (found.items, found.prompts) == (whole.items, whole.clusters) == (40, 30)
    assert found.low == pytest.approx(whole.low, abs=0.04)
    assert found.high == pytest.approx(whole.high, abs=0.04)


def test_a_sample_of_items_stands_for_all(store: Store) -> None:
    settings = Settings(wanted=2, overlap_share=0, gold_share=0)
    project = project_with(store, [pair(n) for n in range(200)], settings=settings)
    ann, bob = people(store, 2)
    work(store, project, ann, careful)
    work(store, project, bob, lambda number, left, done: better(number + (number % 5 == 0), left))
    whole = store.read(lambda connection: read_agreement(connection, project))["pair"]
    part = store.read(lambda connection: read_agreement(connection, project, most=150))["pair"]
    assert (whole.items, whole.is_sample) == (200, False)
    assert (part.items, part.is_sample) == (75, True)
    assert part.low < whole.alpha < part.high


def test_of_many_labels_the_latest_are_read_unless_all_are_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who said left at first, and reads now, shows in all labels alone."""
    monkeypatch.setattr("kedge.label.status.LATEST", 20)
    project = project_with(store, [pair(n) for n in range(80)])
    (ann,) = people(store, 1)
    work(store, project, ann, lambda number, left, done: step(-1) if done < 60 else better(number, left))
    assert not any("a run of" in line for line in status(store, project).next_steps())
    assert any("a run of" in line for line in status(store, project, whole=True).next_steps())


def test_pay_follows_from_hours(store: Store) -> None:
    settings = Settings(overlap_share=0, gold_share=0, pay=18.0, currency="EUR")
    project = project_with(store, [pair(n) for n in range(8)], settings=settings)
    (ann,) = people(store, 1)
    work(store, project, ann, lambda number, left, done: better(number, left, seconds=450.0))
    now = status(store, project)
    assert (now.people[0].hours, now.people[0].pay, now.seconds) == (1.0, 18.0, 450.0)
    assert any("1.0 h, 18.00 EUR" in line for line in now.lines())


def test_what_is_missing_is_told_in_hours(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(20)])
    (ann,) = people(store, 1)
    for _ in range(10):
        task = next_task(store, project, ann)
        assert task is not None
        judge(store, project, ann, task.assignment, step(1))
    now = status(store, project)
    assert now.missing == 10
    assert any("10 labels are missing, about 0.0 h of people" in line for line in now.next_steps())
    assert isinstance(now, Status)


def test_a_session_asks_everybody_the_worst_first(store: Store) -> None:
    settings = Settings(wanted=2, overlap_share=0, gold_share=0)
    project = project_with(store, [pair(n) for n in range(30)], settings=settings)
    ann, bob, eve = people(store, 3)
    work(store, project, ann, careful)
    far = {3, 11, 17}
    work(store, project, bob, lambda number, left, done: better(number + (number in far), left))
    add_items(store, project, [pair(100)])
    task = next_task(store, project, eve)  # has worked here too
    assert task is not None
    judge(store, project, eve, task.assignment, careful(100, True, 0))
    session = calibrate(store, project, items=5)
    assert (session.items, session.labels) == (3, 3)
    numbers: list[int] = []
    while (task := next_task(store, project, eve)) is not None and len(numbers) < 3:
        numbers.append(int(task.answers[0][0].content.split()[2]))
        judge(store, project, eve, task.assignment, step(1))
    assert set(numbers) == far
    assert all(f"> user: question {number}" in session.page for number in far)
    assert "secret-model" not in session.page
    assert "person" not in session.page


def test_where_nobody_disagrees_there_is_no_session(store: Store) -> None:
    project = project_with(store, [pair(0)])
    with pytest.raises(DataError, match="no item on which two people disagree"):
        calibrate(store, project)
