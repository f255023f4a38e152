"""Argilla and Label Studio in and out: what both can say comes back as it was; what one cannot say is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_up import pair, people, project_with, ranked, says, step
from sqlalchemy import select

from kedge.core.errors import ConfigError, DataError
from kedge.data.examples import Pair
from kedge.data.reading import load
from kedge.label import tables
from kedge.label.database import Store
from kedge.label.exchange.files import Tool, read_foreign, send_out
from kedge.label.exchange.records import Foreign, Taken, take_in
from kedge.label.export import Settling, export_labels
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.judging import judge
from kedge.label.projects import Project, Settings, new_project
from kedge.label.questions import Decision
from kedge.label.work import next_task

QUESTIONS = ("pair", "rank", "thumb", "write", "axes", "edit")
ARGILLA: list[dict[str, Any]] = [
    {
        "id": "1",
        "fields": {"prompt": "Why?", "response_1": "because", "response_2": "why not"},
        "metadata": {},
        "suggestions": {"preference": {"value": "response_1", "agent": "gpt"}},
        "responses": {
            "preference": [
                {"value": "response_1", "user_id": "u-1", "status": "submitted"},
                {"value": "second", "user_id": "u-2"},
                {"value": "both_bad", "user_id": "u-3", "status": "submitted"},
                {"value": "response_2", "user_id": "u-4", "status": "draft"},
            ],
            "helpful": [{"value": 6, "user_id": "u-1"}],
            "reason": [{"value": "it answers", "user_id": "u-1"}],
            "fluency": [{"value": "fine", "user_id": "u-1"}],
        },
    },
    {
        "id": "2",
        "fields": {"instruction": "Order.", "a1": "x", "a2": "y", "a3": "z"},
        "responses": [
            {
                "user_id": "u-1",
                "status": "submitted",
                "values": {
                    "order": {
                        "value": [{"value": "a2", "rank": 1}, {"value": "a1", "rank": 3}, {"value": "a3", "rank": 3}]
                    }
                },
            }
        ],
    },
]
LABEL_STUDIO: list[dict[str, Any]] = [
    {
        "id": 7,
        "data": {"prompt": "Why?", "answer1": "because", "answer2": "why not"},
        "annotations": [
            {
                "completed_by": 10,
                "lead_time": 4.5,
                "result": [{"from_name": "pw", "type": "pairwise", "value": {"selected": "right"}}],
            },
            {
                "completed_by": {"id": 11, "email": "eve@example.org"},
                "result": [{"from_name": "pw", "type": "choices", "value": {"choices": ["tie"]}}],
            },
            {"completed_by": 12, "was_cancelled": True, "result": []},
            {"completed_by": 13, "result": [{"from_name": "box", "type": "rectanglelabels", "value": {}}]},
        ],
        "predictions": [{"model_version": "m", "result": []}],
    }
]


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text(json.dumps(rows))
    return str(file)


def take(store: Store, project: Project, file: str) -> tuple[Foreign, Taken]:
    foreign = read_foreign(file)
    assert foreign is not None
    return foreign, take_in(store, project, foreign, origin=file)


def test_argilla_comes_in_with_the_labels_of_each_person(store: Store, tmp_path: Path) -> None:
    project = new_project(store, "shop", QUESTIONS, "Look.")
    foreign, taken = take(store, project, write(tmp_path / "argilla.json", ARGILLA))
    assert (taken.items, taken.labels, taken.people) == (2, 4, 3)
    assert foreign.unsaid == {
        "suggestion for 'preference': not a person's": 1,
        "response that is draft": 1,
        "question 'fluency'": 1,
    }
    rows = store.read(lambda connection: connection.execute(select(tables.judgment)).all())
    assert [(row.verdict, row.outcome, row.ranking) for row in rows] == [
        ("step", -1, None),
        ("step", 1, None),
        ("both_bad", None, None),
        ("ranking", None, [2, 1, 2]),
    ]
    assert (rows[0].axes, rows[0].reason) == ({"helpful": 2}, "it answers")


def test_label_studio_comes_in_and_addresses_stay_out(store: Store, tmp_path: Path) -> None:
    project = new_project(store, "shop", QUESTIONS, "Look.")
    foreign, taken = take(store, project, write(tmp_path / "studio.json", LABEL_STUDIO))
    assert (taken.items, taken.labels, taken.people) == (1, 2, 2)
    assert foreign.unsaid == {
        "prediction: not a person's": 1,
        "annotation that was cancelled": 1,
        "result 'box' of type rectanglelabels": 1,
        "annotation without a verdict": 1,
    }
    kept = store.read(lambda connection: connection.execute(select(tables.person)).all())
    assert [person.email for person in kept] == [None, None]
    assert not {"10", "11"} & {person.uid for person in kept}
    rows = store.read(lambda connection: connection.execute(select(tables.judgment)).all())
    assert [(row.outcome, row.seconds) for row in rows] == [(1, 4.5), (0, 0.0)]


def whole_project(store: Store) -> Project:
    """Everything that can be asked, by two people."""
    thumb = Draft(prompt=says("user", "hello"), answers=(DraftAnswer(text=says("assistant", "go away")),))
    settings = Settings(wanted=2, overlap_share=0, gold_share=0)
    drafts = [pair(n) for n in range(6)] + [ranked(9), thumb, Draft(prompt=says("user", "a poem?"))]
    project = project_with(store, drafts, settings=settings)
    for number, person in enumerate(people(store, 2)):
        done = 0
        while (task := next_task(store, project, person)) is not None:
            done += 1
            match task.kind:
                case "pair" if done == 4:
                    decision = Decision(verdict="both_bad", seconds=3.0)
                case "pair":
                    decision = step((done + 3 * number) % 7 - 3, axes={"honest": done % 4}, reason=f"because {done}")
                case "rank":
                    decision = Decision(verdict="ranking", ranking=(2, 1, 3) if number else (3, 1, 2), seconds=2.0)
                case "thumb":
                    decision = Decision(verdict="thumb", outcome=2 * number - 1, edit="Hello!", seconds=1.0)
                case _:
                    decision = Decision(verdict="written", edit="Roses\nare red.", seconds=9.0)
            judge(store, project, person, task.assignment, decision)
    return project


def said(file: Path) -> list[Any]:
    """What a file says, with people numbered as they come: names are each store's own."""
    text = file.read_text()
    rows = json.loads(text)
    names: dict[str, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: names.setdefault(part, f"person {len(names)}")
                if key in ("user_id", "completed_by")
                else walk(part)
                for key, part in value.items()
            }
        return [walk(part) for part in value] if isinstance(value, list) else value

    return [walk(row) for row in rows]


@pytest.mark.parametrize("tool", ["argilla", "label-studio"])
def test_out_and_in_and_out_is_the_same(store: Store, tmp_path: Path, tool: Tool) -> None:
    project = whole_project(store)
    sent = send_out(store, project, tmp_path / "first.json", tool)
    assert (sent.items, sent.labels, sent.unsaid) == (9, 18, {})
    other = new_project(store, "other", QUESTIONS, "Look.")
    _, taken = take(store, other, str(tmp_path / "first.json"))
    assert (taken.items, taken.labels, taken.people) == (9, 18, 2)
    send_out(store, other, tmp_path / "second.json", tool)
    assert said(tmp_path / "second.json") == said(tmp_path / "first.json")
    for kind in ("pairs", "rankings", "thumbs", "demonstrations"):
        rows = []
        for number, own in enumerate((project, other)):
            export_labels(store, own, tmp_path / f"{kind}-{number}.jsonl", kind=kind)
            lines = (tmp_path / f"{kind}-{number}.jsonl").read_text().splitlines()
            unnamed = ("people", "as_of", "chosen_model", "rejected_model", "models")
            rows.append([{k: v for k, v in json.loads(line).items() if k not in unnamed} for line in lines])
        assert rows[0] == rows[1]


@pytest.mark.parametrize("tool", ["argilla", "label-studio"])
def test_our_own_labels_are_known_when_they_come_back(store: Store, tmp_path: Path, tool: Tool) -> None:
    project = whole_project(store)
    send_out(store, project, tmp_path / "out.json", tool)
    _, taken = take(store, project, str(tmp_path / "out.json"))
    assert (taken.items, taken.labels, taken.known_labels) == (0, 0, 18)


def test_what_cannot_be_said_is_counted(store: Store, tmp_path: Path) -> None:
    project = project_with(store, [ranked(0)])
    (ann,) = people(store, 1)
    task = next_task(store, project, ann)
    assert task is not None
    judge(store, project, ann, task.assignment, Decision(verdict="ranking", ranking=(1, 1, 2)))
    sent = send_out(store, project, tmp_path / "out.json", "label-studio")
    assert sent.unsaid == {"ranking with ties: label-studio orders strictly": 1}
    assert "ties in rankings" in sent.cannot


def test_a_table_of_labels_and_a_folder_of_pairs(store: Store, tmp_path: Path) -> None:
    project = whole_project(store)
    send_out(store, project, tmp_path / "labels.csv", "csv")
    lines = (tmp_path / "labels.csv").read_text().splitlines()
    assert len(lines) == 19
    assert lines[0] == "item,prompt,person,kind,verdict,label,seconds,heldout"
    assert "example.org" not in "".join(lines)
    send_out(store, project, tmp_path / "folder", "datasets", settling=Settling(settle="dawid_skene"))
    pairs = [example for example in load(tmp_path / "folder") if isinstance(example, Pair)]
    export_labels(store, project, tmp_path / "pairs.jsonl", settling=Settling(settle="dawid_skene"))
    same = [example for example in load(tmp_path / "pairs.jsonl") if isinstance(example, Pair)]
    assert [(one.prompt, one.chosen, one.certainty) for one in pairs] == [
        (one.prompt, one.chosen, one.certainty) for one in same
    ]
    with pytest.raises(ConfigError, match=r"writes \.json"):
        send_out(store, project, tmp_path / "labels.txt", "argilla")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"fields": {"text": "x"}, "responses": {}}, "one of them is the prompt"),
    "nobody": (
        {"fields": {"prompt": "p", "a": "x", "b": "y"}, "responses": {"q": [{"value": "a"}]}},
        "every label has a person",
    ),
    "half a ranking": (
        {
            "fields": {"prompt": "p", "a": "x", "b": "y", "c": "z"},
            "responses": {"q": [{"value": [{"value": "a", "rank": 1}], "user_id": "u"}]},
        },
        "a rank for each of a, b, c",
    ),
    "no side": (
        {
            "data": {"prompt": "p", "a": "x", "b": "y"},
            "annotations": [{"completed_by": 1, "result": [{"type": "pairwise", "value": {"selected": "up"}}]}],
        },
        "selects left or right",
    ),
    "no such answer": (
        {
            "data": {"prompt": "p", "answers": ["x", "y", "z"]},
            "annotations": [
                {"completed_by": 1, "result": [{"type": "ranker", "value": {"ranker": {"rank": ["answer_9"]}}}]}
            ],
        },
        "it orders answer_1 to answer_3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_place(tmp_path: Path, name: str) -> None:
    row, words = BROKEN[name]
    with pytest.raises(DataError, match=words):
        read_foreign(write(tmp_path / "broken.json", [row]))
