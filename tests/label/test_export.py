"""Exports: what `as_of` names never changes, votes are settled, identities stay behind, and Kedge reads it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from clusters import Cluster
from made_up import Clock, gold_pair, pair, people, project_with, ranked, says, step
from sqlalchemy import update

from kedge.commands.judge.reading import read_people
from kedge.core.errors import ConfigError, DataError
from kedge.data.examples import Demonstration, Pair, Ranking, Thumb
from kedge.data.reading import load
from kedge.label import tables
from kedge.label.accounts import Person, add_person, forget, pseudonym
from kedge.label.database import Store, open_store
from kedge.label.export import EXPORT_KINDS, export_labels
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.items import add_items
from kedge.label.judging import judge, undo
from kedge.label.projects import Project, Settings
from kedge.label.questions import Decision
from kedge.label.work import next_task


def answer_all(store: Store, project: Project, person: Person, decide: Callable[[Any], Decision]) -> list[str]:
    assignments: list[str] = []
    while (task := next_task(store, project, person)) is not None:
        judge(store, project, person, task.assignment, decide(task))
        assignments.append(task.assignment)
    return assignments


def towards(place: int, strength: int, **options: Any) -> Callable[[Any], Decision]:
    """Prefers the answer of a place, on whatever side it stands."""

    def decide(task: Any) -> Decision:
        word = ("first", "second")[place]
        return step(-strength if task.answers[0][0].content.startswith(word) else strength, **options)

    return decide


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_steps_become_margins_and_the_file_reads_as_pairs(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(n) for n in range(4)])
    (ann,) = people(store, 1)
    strengths = iter((3, 2, 1, 0))
    answer_all(store, project, ann, lambda task: towards(1, next(strengths))(task))
    out = tmp_path / "pairs.jsonl"
    exported = export_labels(store, project, out)
    assert (exported.rows, exported.as_of, exported.left_out) == (3, 4, {"ties": 1})
    pairs = [example for example in load(out) if isinstance(example, Pair)]
    assert [example.margin for example in pairs] == [1.0, 2 / 3, 1 / 3]
    assert [example.chosen[0].content for example in pairs] == [f"second of {n}" for n in range(3)]
    first = lines(out)[0]
    assert {name: first[name] for name in ("certainty", "labels", "consistent", "as_of", "round")} == {
        "certainty": 1.0,
        "labels": 1,
        "consistent": True,
        "as_of": 4,
        "round": 0,
    }
    assert (first["chosen_model"], first["rejected_model"]) == ("secret-model-b", "secret-model-a")


def test_votes_are_settled_with_their_certainty(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0)], settings=Settings(wanted=3, overlap_share=0, gold_share=0))
    for person, decide in zip(people(store, 3), (towards(0, 3), towards(0, 2), towards(1, 1)), strict=True):
        answer_all(store, project, person, decide)
    export_labels(store, project, tmp_path / "pairs.jsonl")
    (row,) = lines(tmp_path / "pairs.jsonl")
    assert row["chosen"][0]["content"] == "first of 0"
    assert (row["certainty"], row["margin"], row["labels"], row["consistent"]) == (2 / 3, 4 / 9, 3, False)


def test_both_bad_never_makes_a_chosen_answer(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0)], settings=Settings(wanted=2, overlap_share=0, gold_share=0))
    ann, bob = people(store, 2)
    answer_all(store, project, ann, towards(0, 3))
    answer_all(store, project, bob, lambda task: Decision(verdict="both_bad"))
    for kind in ("pairs", "rankings"):
        exported = export_labels(store, project, tmp_path / f"{kind}.jsonl", kind=kind)
        assert (exported.rows, exported.left_out) == (0, {"both bad": 1})


def test_axes_are_told_towards_the_chosen_answer(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(n) for n in range(4)])
    (ann,) = people(store, 1)

    def decide(task: Any) -> Decision:
        sign = -1 if task.answers[0][0].content.startswith("first") else 1
        return step(2 * sign, axes={"helpful": 3 * sign, "harmless": -1 * sign})

    answer_all(store, project, ann, decide)
    export_labels(store, project, tmp_path / "pairs.jsonl")
    assert [row["axes"] for row in lines(tmp_path / "pairs.jsonl")] == [{"harmless": -1 / 3, "helpful": 1.0}] * 4


def test_a_tie_is_a_ranking_with_equal_ranks(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0), ranked(1)])
    (ann,) = people(store, 1)

    def decide(task: Any) -> Decision:
        if task.kind == "pair":
            return step(0)
        ranking = tuple(min(2, 1 + int(answer[0].content.split()[1])) for answer in task.answers)
        return Decision(verdict="ranking", ranking=ranking)

    answer_all(store, project, ann, decide)
    export_labels(store, project, tmp_path / "rankings.jsonl", kind="rankings")
    rankings = [example for example in load(tmp_path / "rankings.jsonl") if isinstance(example, Ranking)]
    assert [example.rank for example in rankings] == [(1, 1), (1, 2, 2)]
    export_labels(store, project, tmp_path / "pairs.jsonl")
    assert len(lines(tmp_path / "pairs.jsonl")) == 2, "the ranking has two pairs without a tie"


def test_thumbs_and_written_answers_come_out_as_their_kinds(store: Store, tmp_path: Path) -> None:
    one = Draft(prompt=says("user", "hello"), answers=(DraftAnswer(text=says("assistant", "go away")),))
    project = project_with(store, [one, Draft(prompt=says("user", "a poem?\0"))])
    (ann,) = people(store, 1)

    def decide(task: Any) -> Decision:
        if task.kind == "thumb":
            return Decision(verdict="thumb", outcome=-1, edit="Hello! \0 ä")
        return Decision(verdict="written", edit="Roses are red.")

    answer_all(store, project, ann, decide)
    for kind in ("thumbs", "demonstrations"):
        export_labels(store, project, tmp_path / f"{kind}.jsonl", kind=kind)
    (thumb,) = load(tmp_path / "thumbs.jsonl")
    assert isinstance(thumb, Thumb)
    assert not thumb.is_good
    texts = [
        row.messages[-1].content for row in load(tmp_path / "demonstrations.jsonl") if isinstance(row, Demonstration)
    ]
    assert texts == ["Hello! \0 ä", "Roses are red."]


def test_as_of_gives_the_same_bytes_for_ever(store: Store, tmp_path: Path, clock: Clock) -> None:
    project = project_with(
        store, [pair(n) for n in range(3)], settings=Settings(wanted=2, overlap_share=0, gold_share=0)
    )
    ann, bob = people(store, 2)
    assignments = answer_all(store, project, ann, towards(0, 2))
    export_labels(store, project, tmp_path / "before.jsonl", as_of=2)
    judge(store, project, ann, assignments[0], step(0), corrects=True)
    undo(store, ann, assignments[1])
    answer_all(store, project, bob, towards(1, 3))
    add_items(store, project, [pair(n) for n in range(3, 6)])
    clock.advance(1000)
    forget(store, "person0@example.org")
    export_labels(store, project, tmp_path / "after.jsonl", as_of=2)
    assert (tmp_path / "before.jsonl").read_bytes() == (tmp_path / "after.jsonl").read_bytes()
    export_labels(store, project, tmp_path / "now.jsonl")
    assert (tmp_path / "now.jsonl").read_bytes() != (tmp_path / "after.jsonl").read_bytes()


def test_an_export_that_was_changed_behind_the_store_is_refused(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    answer_all(store, project, ann, towards(0, 2))
    export_labels(store, project, tmp_path / "a.jsonl")
    store.write(lambda connection: connection.execute(update(tables.judgment).values(outcome=3)))
    with pytest.raises(DataError, match="the store was changed"):
        export_labels(store, project, tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_gold_stays_inside_and_held_out_items_come_only_when_asked_for(store: Store, tmp_path: Path) -> None:
    project = project_with(
        store,
        [pair(n, is_heldout=n % 2 == 0) for n in range(20)],
        settings=Settings(overlap_share=0, gold_share=0.5),
    )
    add_items(store, project, [gold_pair(n) for n in range(1000, 1010)])
    (ann,) = people(store, 1)
    answer_all(store, project, ann, towards(0, 1))
    questions: dict[bool, list[int]] = {}
    for heldout in (False, True):
        out = tmp_path / f"{heldout}.jsonl"
        export_labels(store, project, out, heldout=heldout)
        questions[heldout] = [int(row["prompt"][0]["content"].split()[1]) for row in lines(out)]
    assert questions == {False: list(range(1, 20, 2)), True: list(range(0, 20, 2))}


def test_exports_carry_a_pseudonym_that_outlives_the_person(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    answer_all(store, project, ann, towards(0, 1))
    export_labels(store, project, tmp_path / "before.jsonl")
    forget(store, "person0@example.org")
    export_labels(store, project, tmp_path / "after.jsonl")
    (row,) = lines(tmp_path / "after.jsonl")
    assert len(row["people"]) == 1
    assert ann.uid not in row["people"]
    assert "example.org" not in (tmp_path / "before.jsonl").read_text()
    assert (tmp_path / "before.jsonl").read_bytes() == (tmp_path / "after.jsonl").read_bytes()


def test_what_cannot_be_exported_is_refused_with_words(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [pair(0)])
    with pytest.raises(ConfigError, match="did you mean 'pairs'"):
        export_labels(store, project, tmp_path / "x.jsonl", kind="pair")
    with pytest.raises(ConfigError, match="the last judgment has number 0"):
        export_labels(store, project, tmp_path / "x.jsonl", as_of=1)
    (tmp_path / "x.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        export_labels(store, project, tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_text() == "mine"


def test_verdicts_name_what_every_person_said(store: Store, tmp_path: Path) -> None:
    """By the answers' own places, whatever the sides; machines and rankings are left out, and counted."""
    project = project_with(store, [*(pair(number) for number in range(3)), ranked(9)], settings=Settings(wanted=3))
    ann, ben = people(store, 2)
    machine = add_person(store, "machine@example.org", role="machine")
    both_bad = Decision(verdict="both_bad")

    def rank(task: Any) -> Decision:
        return Decision(verdict="ranking", ranking=tuple(range(1, len(task.answers) + 1)))

    def by(decide: Callable[[Any], Decision]) -> Callable[[Any], Decision]:
        return lambda task: rank(task) if task.kind == "rank" else decide(task)

    answer_all(store, project, ann, by(towards(0, 2)))
    answer_all(
        store,
        project,
        ben,
        by(lambda task: both_bad if "question 1" in task.prompt[0].content else towards(1, 1)(task)),
    )
    answer_all(store, project, machine, by(towards(1, 3)))
    out = tmp_path / "verdicts.jsonl"
    exported = export_labels(store, project, out, kind="verdicts")
    assert (exported.rows, exported.left_out) == (3, {"of another kind (rank)": 1})
    ann_name, ben_name = (pseudonym(project, person.uid) for person in (ann, ben))
    items = read_people(out)
    assert [dict(item.verdicts) for item in items] == [
        {ann_name: "first", ben_name: "tie" if number == 1 else "second"} for number in range(3)
    ]
    assert [(item.first, item.second, item.prompt) for item in items] == [
        (f"first of {number}", f"second of {number}", (("user", f"question {number}"),)) for number in range(3)
    ]
    assert items[0].models == ("secret-model-a", "secret-model-b")
    assert "example.org" not in out.read_text()


def whole_day(address: str, folder: Path) -> dict[str, bytes]:
    """The same people decide the same things in any store; every export of it."""
    clock = Clock()
    store = open_store(address, create=True, now=clock, randomness=Random(3))
    answers = (DraftAnswer(text=says("assistant", "\0 ä 🙂 \u2028"), model="m", seed=2**40, scores={"reward": 0.1}),)
    drafts = [*(pair(n, priority=n % 3, propensity=0.1 * n) for n in range(30)), *(ranked(n, 4) for n in range(30, 40))]
    drafts.append(Draft(prompt=says("user", "hm?"), answers=answers, priority=9.0))
    project = project_with(store, drafts, settings=Settings(overlap_share=0.5, gold_share=0.1))
    add_items(store, project, [gold_pair(n) for n in range(1000, 1005)])
    choice = Random(5)

    def decide(task: Any) -> Decision:
        clock.advance(0.5)
        if task.kind == "rank":
            return Decision(verdict="ranking", ranking=tuple(choice.randint(1, 4) for _ in range(4)), edit="better ä\0")
        if task.kind == "thumb":
            return Decision(verdict="thumb", outcome=choice.choice((-1, 1)))
        if choice.random() < 0.1:
            return Decision(verdict="skip", reason="no\0")
        return step(choice.randint(-3, 3), axes={"honest": choice.randint(-3, 3)}, edit=choice.choice((None, "mine")))

    for person in people(store, 4):
        answer_all(store, project, person, decide)
    exports: dict[str, bytes] = {}
    for kind in EXPORT_KINDS:
        for as_of in (20, None):
            out = folder / f"{kind}-{as_of}.jsonl"
            export_labels(store, project, out, kind=kind, as_of=as_of)
            exports[out.name] = out.read_bytes()
    store.close()
    return exports


@pytest.mark.postgres
def test_sqlite_and_postgresql_export_the_same_bytes(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("sqlite", "postgres"):
        (tmp_path / name).mkdir()
    sqlite = whole_day(str(tmp_path / "labels.db"), tmp_path / "sqlite")
    postgres = whole_day(cluster.new_database(), tmp_path / "postgres")
    assert sqlite == postgres
    assert min(len(content) for content in sqlite.values()) > 0
