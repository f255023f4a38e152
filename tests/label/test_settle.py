"""How several labels become one: majorities, votes that weigh by gold, Dawid and Skene; what both-bad and ties do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from made_up import gold_pair, pair, people, project_with, ranked, step
from sqlalchemy import select

from kedge.data.examples import Pair
from kedge.data.reading import load
from kedge.feedback import dawid_skene
from kedge.label import tables
from kedge.label.accounts import Person, add_person
from kedge.label.database import Store
from kedge.label.export import Settling, export_labels
from kedge.label.incoming import Draft
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.settle import MIRROR
from kedge.label.team.review import decide
from kedge.label.work import next_task

ALL = Settings(wanted=5, overlap_share=0, gold_share=0)


def work(store: Store, project: Project, person: Person, decide: Callable[[int, int], Decision]) -> None:
    """`decide` is given the item's number and the place of the answer that is shown first."""
    while (task := next_task(store, project, person)) is not None:
        word, _, number = task.answers[0][0].content.split()
        place = 0 if word == "first" else 1
        judge(store, project, person, task.assignment, decide(int(number), place))


def towards(place: int, strength: int, shown_first: int) -> Decision:
    return step(-strength if place == shown_first else strength)


def labelled_by(store: Store, skills: Sequence[float], drafts: Sequence[Draft]) -> tuple[Project, list[int]]:
    """People of these skills label everything; the truth of each item, the place of its better answer."""
    project = project_with(store, list(drafts), settings=Settings(wanted=len(skills), overlap_share=0, gold_share=0))
    chance = Random(3)
    truth = [chance.randrange(2) for _ in drafts]
    for person, skill in zip(people(store, len(skills)), skills, strict=True):

        def decide(number: int, shown: int, skill: float = skill) -> Decision:
            place = truth[number] if chance.random() < skill else 1 - truth[number]
            return towards(place, 2, shown)

        work(store, project, person, decide)
    return project, truth


def rows(store: Store, project: Project, file: Path, kind: str = "pairs", **how: Any) -> list[dict[str, Any]]:
    export_labels(store, project, file, kind=kind, settling=Settling(**how), force=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_certainty_is_the_posterior_that_dawid_and_skene_find(store: Store, tmp_path: Path) -> None:
    project, _ = labelled_by(store, (0.95, 0.9, 0.55, 0.5, 0.5), [pair(n) for n in range(60)])
    exported = rows(store, project, tmp_path / "pairs.jsonl", settle="dawid_skene")
    export_labels(store, project, tmp_path / "votes.jsonl", kind="rankings")
    # The same labels from the judgments themselves, as the statistics read them.
    ratings = _ratings(store, project)
    turned = [[None if label is None else MIRROR[label] for label in row] for row in ratings]
    fitted = dawid_skene(
        [row if n % 2 == 1 else turned[n] for n, row in enumerate(ratings)], classes=4, mirrored=MIRROR
    )
    wanted = {f"question {n}": max(p[0], p[2]) + p[1] / 2 for n, p in enumerate(fitted.posterior.tolist())}
    assert len(exported) == 60
    for row in exported:
        assert row["certainty"] == pytest.approx(wanted[row["prompt"][0]["content"]], abs=1e-6)


def _ratings(store: Store, project: Project) -> list[list[int | None]]:
    from kedge.label.beliefs import effective

    table: dict[int, dict[int, int]] = {}
    for row in store.read(lambda connection: connection.execute(effective(project, 10**9)).all()):
        table.setdefault(row.item, {})[row.person] = 1 + int(np.sign(row.outcome))
    persons = sorted({person for own in table.values() for person in own})
    return [[table[item].get(person) for person in persons] for item in sorted(table)]


def test_dawid_and_skene_are_right_more_often_than_majorities(store: Store, tmp_path: Path) -> None:
    project, truth = labelled_by(store, (0.97, 0.95, 0.5, 0.5, 0.5), [pair(n) for n in range(150)])
    right = {}
    for settle in ("majority", "dawid_skene"):
        exported = rows(store, project, tmp_path / f"{settle}.jsonl", settle=settle)
        chosen = [row["chosen"][0]["content"].split() for row in exported]
        right[settle] = sum(word == ("first", "second")[truth[int(number)]] for word, _, number in chosen)
    assert right["dawid_skene"] >= right["majority"] + 8


def test_votes_weigh_by_gold(store: Store, tmp_path: Path) -> None:
    """Two who fail on gold outvote by number, and not by weight, one who passes."""
    project = project_with(
        store,
        [pair(n) for n in range(40)] + [gold_pair(n) for n in range(100, 130)],
        settings=Settings(wanted=3, overlap_share=0, gold_share=0.4),
    )
    careful, *others = people(store, 3)
    work(store, project, careful, lambda number, shown: towards(0, 2, shown))
    for person in others:
        work(store, project, person, lambda number, shown: towards(1, 2, shown))
    by_majority = rows(store, project, tmp_path / "m.jsonl")
    by_gold = rows(store, project, tmp_path / "w.jsonl", settle="weighted")
    assert {row["chosen"][0]["content"].split()[0] for row in by_majority} == {"second"}
    assert {row["chosen"][0]["content"].split()[0] for row in by_gold} == {"first"}
    assert {row["certainty"] for row in by_gold} == {1.0}, "who errs more often than not has no vote"


def test_without_gold_weighted_votes_are_majorities(store: Store, tmp_path: Path) -> None:
    project, _ = labelled_by(store, (0.8, 0.7, 0.6), [pair(n) for n in range(10)])
    assert rows(store, project, tmp_path / "a.jsonl") == rows(store, project, tmp_path / "b.jsonl", settle="weighted")


@pytest.mark.parametrize("settle", ["majority", "dawid_skene", "weighted"])
def test_both_bad_never_makes_a_chosen_answer(store: Store, tmp_path: Path, settle: str) -> None:
    """Also where the only person who prefers one is the one who is believed most."""
    project = project_with(
        store, [pair(n) for n in range(30)], settings=Settings(wanted=2, overlap_share=0, gold_share=0)
    )
    ann, bob = people(store, 2)
    work(store, project, ann, lambda number, shown: towards(0, 3, shown))
    work(
        store,
        project,
        bob,
        lambda number, shown: Decision(verdict="both_bad") if number % 3 == 0 else towards(0, 3, shown),
    )
    for kind in ("pairs", "rankings"):
        exported = rows(store, project, tmp_path / f"{kind}.jsonl", kind, settle=settle, ties="half")
        asked = {int(row["prompt"][0]["content"].split()[1]) for row in exported}
        assert asked == {number for number in range(30) if number % 3}


@pytest.mark.parametrize("settle", ["majority", "dawid_skene", "weighted"])
def test_what_a_reviewer_decided_stands_whoever_is_believed(store: Store, tmp_path: Path, settle: str) -> None:
    project, truth = labelled_by(store, (0.95, 0.95, 0.95), [pair(n) for n in range(10)])
    reviewer = add_person(store, "chief@example.org", "manager")
    query = select(tables.item.c.key).order_by(tables.item.c.id).limit(1)
    key = store.read(lambda connection: connection.execute(query).scalar_one())
    decide(store, project, reviewer, key, step(3 if truth[0] == 0 else -3))
    row = rows(store, project, tmp_path / "pairs.jsonl", settle=settle)[0]
    assert row["chosen"][0]["content"] == ("second", "first")[truth[0]] + " of 0"
    assert (row["decided"], row["certainty"], row["labels"]) == (True, 1.0, 1)


def test_a_tie_is_a_pair_of_certainty_one_half_where_asked(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(n) for n in range(4)])
    (ann,) = people(store, 1)
    work(store, project, ann, lambda number, shown: step(0) if number < 3 else towards(1, 1, shown))
    export_labels(store, project, tmp_path / "p.jsonl", settling=Settling(ties="half", margins="large"))
    pairs = [example for example in load(tmp_path / "p.jsonl") if isinstance(example, Pair)]
    assert [example.is_tie for example in pairs] == [True, True, True, False]
    assert [example.margin for example in pairs] == [None, None, None, 1.0]


@pytest.mark.parametrize("settle", ["dawid_skene", "weighted"])
def test_rankings_and_thumbs_are_settled_too(store: Store, tmp_path: Path, settle: str) -> None:
    project = project_with(store, [ranked(n) for n in range(20)], settings=Settings(wanted=3, overlap_share=0))
    for number, person in enumerate(people(store, 3)):
        while (task := next_task(store, project, person)) is not None:
            places = [1 + int(answer[0].content.split()[1]) for answer in task.answers]
            ranking = tuple(places if number < 2 else [4 - place for place in places])
            judge(store, project, person, task.assignment, Decision(verdict="ranking", ranking=ranking))
    assert {tuple(row["rank"]) for row in rows(store, project, tmp_path / "r.jsonl", "rankings", settle=settle)} == {
        (1, 2, 3)
    }
    assert len(rows(store, project, tmp_path / "p.jsonl", settle=settle)) == 60
