"""Items that come again: the same person, sides swapped, in no export, and what they say of a person."""

from __future__ import annotations

from pathlib import Path
from random import Random

from made_up import Clock, pair, people, project_with, ranked, step
from sqlalchemy import func, select

from kedge.feedback import self_agreement
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.database import Store
from kedge.label.export import export_labels
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.repeats import self_agreements
from kedge.label.status import status
from kedge.label.work import next_task

OFTEN = Settings(overlap_share=0, gold_share=0, repeat_share=0.5)


def work(store: Store, clock: Clock, project: Project, person: Person, *, steady: bool) -> list[tuple[str, str]]:
    """What was shown, left and right, in order; who is not steady throws a coin."""
    shown: list[tuple[str, str]] = []
    coin = Random(1)
    while (task := next_task(store, project, person)) is not None:
        left, right = (answer[0].content for answer in task.answers)
        shown.append((left, right))
        prefers_left = left.startswith("first") if steady else coin.random() < 0.5
        judge(store, project, person, task.assignment, step(-2 if prefers_left else 2))
        clock.advance(11)
    return shown


def test_an_item_comes_again_once_with_sides_swapped(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(n) for n in range(40)], settings=OFTEN)
    (ann,) = people(store, 1)
    shown = work(store, clock, project, ann, steady=True)
    repeated = [(left, right) for left, right in shown if (right, left) in shown]
    assert len(shown) == 40 + len(repeated) // 2
    assert 10 <= len(repeated) // 2 <= 40
    assert len(set(shown)) == len(shown), "no order comes twice"


def test_what_came_again_is_no_label_and_no_item(store: Store, clock: Clock, tmp_path: Path) -> None:
    project = project_with(store, [pair(n) for n in range(20)], settings=OFTEN)
    (ann,) = people(store, 1)
    work(store, clock, project, ann, steady=True)
    judgments = store.read(lambda connection: connection.scalar(select(func.count()).select_from(tables.judgment)))
    now = status(store, project)
    assert judgments is not None
    assert judgments > 20
    assert (now.items, now.given, now.wanted, now.people[0].labels) == (20, 20, 20, 20)
    assert export_labels(store, project, tmp_path / "pairs.jsonl").rows == 20


def test_it_does_not_come_again_while_it_is_remembered(store: Store) -> None:
    project = project_with(store, [pair(n) for n in range(20)], settings=OFTEN)
    (ann,) = people(store, 1)
    count = 0
    while (task := next_task(store, project, ann)) is not None:
        judge(store, project, ann, task.assignment, step(1))
        count += 1
    assert count == 20


def test_who_throws_a_coin_does_not_agree_with_themselves(store: Store, clock: Clock) -> None:
    settings = Settings(wanted=2, overlap_share=0, gold_share=0, repeat_share=0.5)
    project = project_with(store, [pair(n) for n in range(60)], settings=settings)
    ann, bob = people(store, 2)
    work(store, clock, project, ann, steady=True)
    work(store, clock, project, bob, steady=False)
    shares = store.read(lambda connection: self_agreements(connection, project))
    assert shares[ann.id].value == 1.0
    assert shares[bob.id].value < 0.75


def test_the_same_again_is_that_of_the_statistics(store: Store, clock: Clock) -> None:
    """Pairs, thumbs and rankings, with ties and both bad: by answers, whatever side they stood on."""
    drafts = [*(pair(n) for n in range(40)), *(ranked(100 + n) for n in range(20))]
    project = project_with(store, drafts, settings=OFTEN)
    (ann,) = people(store, 1)
    chance, said = Random(3), dict[frozenset[str], list[object]]()
    while (task := next_task(store, project, ann)) is not None:
        texts = [answer[0].content for answer in task.answers]
        if task.kind == "rank":
            ranks = dict(zip(sorted(texts), chance.choice([(1, 2, 3), (1, 1, 2)]), strict=True))
            decision, label = Decision(verdict="ranking", ranking=tuple(ranks[t] for t in texts)), tuple(ranks.values())
        else:
            outcome = chance.choice([-3, -1, 0, 2])
            is_bad = outcome and chance.random() < 0.2
            decision = Decision(verdict="both_bad") if is_bad else step(outcome)
            better = texts[outcome > 0] if outcome else None
            label = "bad" if is_bad else better
        judge(store, project, ann, task.assignment, decision)
        said.setdefault(frozenset(texts), []).append(label)
        clock.advance(11)
    twice = [labels for labels in said.values() if len(labels) == 2]
    expected = self_agreement([first for first, _ in twice], [again for _, again in twice])
    assert 0.2 < expected.value < 0.8
    assert store.read(lambda connection: self_agreements(connection, project)) == {ann.id: expected}
