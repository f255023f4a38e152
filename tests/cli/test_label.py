"""`kedge label` without its pages: a project, items from every kind of file, status, exports, people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.label.accounts import add_person
from kedge.label.database import open_store
from kedge.label.judging import judge
from kedge.label.projects import find_project
from kedge.label.questions import Decision
from kedge.label.work import next_task

PAIRS = [{"prompt": f"question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
ANSWERS = [
    {"id": f"{model}-{n}-0", "model": model, "prompt": f"question {n}", "answer": answer, "scores": {}, "seed": 1}
    for n in range(2)
    for model, answer in (("sft", "yes"), ("ppo", f"no {n}"), ("dpo", "yes"))
]
TASK = {"prompt": "q", "answers": [{"text": "a", "model": "sft"}, "b"], "priority": 2.0, "propensity": 0.5, "round": 2}


@pytest.fixture
def shop(kedge: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`kedge label`, with a project `shop` that asks for pairs."""
    (tmp_path / "guide.md").write_text("Prefer what is true.")
    assert (
        kedge("label", "new", "shop", "--questions", "pair,axes", "--guideline", "guide.md", "--overlap", "0").code == 0
    )
    return lambda *arguments: kedge("label", *arguments)


def write(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file.name


def label_everything(folder: Path, outcome: int = -2) -> None:
    """One person prefers what stands on the left, by two steps."""
    store = open_store(str(folder / "labels.db"))
    project = find_project(store, "shop")
    ann = add_person(store, "ann@example.org")
    while (task := next_task(store, project, ann)) is not None:
        judge(store, project, ann, task.assignment, Decision(verdict="step", outcome=outcome, seconds=36.0))
    store.close()


def test_from_pairs_to_labels_to_pairs(shop: Callable[..., Any], kedge: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", PAIRS)
    assert "3 items added, 0 were there already" in shop("add", "shop", "pairs.jsonl").out
    assert "0 items added, 3 were there already" in shop("add", "shop", "pairs.jsonl").out
    label_everything(tmp_path)
    assert "3 items, 3 of 3 labels (100.0%)" in shop("status", "shop", "--verify").out
    told = json.loads(shop("status", "shop", "--json").out)
    (ann,) = told["people"]
    assert (ann["name"], ann["labels"], ann["skipped"], ann["hours"]) == ("ann@example.org", 3, 0, 0.03)
    assert ann["care"]["bias"]["value"] == 0.5, "always on the left"
    assert told["next"][-1] == "all labels are there: `kedge label export shop --out labels.jsonl`"
    assert "3 pairs as of 3" in shop("export", "shop", "--out", "labels.jsonl").out
    assert "2 pairs as of 2" in shop("export", "shop", "--out", "earlier.jsonl", "--as-of", "2").out
    checked = kedge("data", "check", "labels.jsonl")
    assert "pairs" in checked.out
    assert checked.code != 2


def test_every_kind_of_file_becomes_items(shop: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", ANSWERS)
    answers = shop("add", "shop", "answers.jsonl").out
    assert "answers; 2 items added" in answers
    assert "2 left out: both answers are the same" in answers
    assert "0 items added, 4 were there already" in shop("add", "shop", "answers.jsonl", "--baseline", "ppo").out
    write(tmp_path / "tasks.jsonl", [TASK])
    assert "tasks; 1 item added" in shop("add", "shop", "tasks.jsonl").out
    write(tmp_path / "rankings.jsonl", [{"prompt": "r", "answers": ["x", "y"], "rank": [2, 1]}])
    assert "rankings; 1 gold item added" in shop("add", "shop", "rankings.jsonl", "--gold").out


WRONG = [
    (["add", "shop", "none.jsonl"], "none.jsonl"),
    (["add", "shop", "prompts.jsonl"], "0 answers are asked as 'write'"),
    (["add", "shop", "prompts.jsonl", "--gold"], "a bare prompt says nothing of what is right"),
    (["add", "shop", "demonstrations.jsonl"], "there is nothing to ask about them"),
    (["add", "shop", "answers.jsonl", "--baseline", "pop"], "did you mean 'ppo'"),
    (["add", "shop", "answers.jsonl", "--gold"], "say nothing of which is right"),
    (["add", "shop", "pairs.jsonl", "--baseline", "sft"], "holds no answers of models"),
    (["add", "shop", "tasks.jsonl"], "tasks.jsonl:1: field 'priorty'"),
    (["add", "shop", "bad.jsonl", "--gold"], "bad.jsonl:1: field 'expected' is 9"),
    (["status", "shp"], "did you mean 'shop'"),
    (["status", "shop", "--db", "other.db"], "there is no store of labels here"),
    (["status", "shop", "--db", "mysql://x:secret@y/z"], "sqlite and postgresql are known"),
    (["export", "shop", "--out", "x.jsonl", "--as-of", "7"], "the last judgment has number 0"),
    (["export", "shop", "--out", "x.docx"], "must end in .jsonl"),
    (["export", "shop", "--out", "pairs.jsonl"], "--force"),
    (["forget", "shop", "bob@example.org"], "nobody with this address"),
    (["invite", "shop", "bob@example.org", "--role", "boss"], "there is no such role"),
    (["new", "shop", "--questions", "pair", "--guideline", "guide.md"], "of this name already"),
    (["new", "a b", "--questions", "pair", "--guideline", "guide.md"], "letters, digits"),
    (["new", "two", "--questions", "pairs", "--guideline", "guide.md"], "did you mean 'pair'"),
    (["new", "two", "--questions", "axes", "--guideline", "guide.md"], "ask at least one of"),
    (["new", "two", "--questions", "pair", "--guideline", "none.md"], "name a file of text"),
    (["new", "two", "--questions", "pair", "--guideline", "empty.md"], "the guideline is empty"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_is_wrong_is_said_and_changes_nothing(
    shop: Callable[..., Any], tmp_path: Path, arguments: list[str], words: str
) -> None:
    write(tmp_path / "pairs.jsonl", PAIRS)
    write(tmp_path / "answers.jsonl", ANSWERS)
    write(tmp_path / "prompts.jsonl", [{"prompt": "hm?"}])
    write(tmp_path / "demonstrations.jsonl", [{"prompt": "hm?", "completion": "yes"}])
    write(tmp_path / "tasks.jsonl", [{**TASK, "priorty": 1}])
    write(tmp_path / "bad.jsonl", [{**TASK, "expected": 9}])
    (tmp_path / "empty.md").write_text(" \n")
    before = shop("status", "shop", "--json").out
    done = shop(*arguments)
    assert done.code == 2, done
    assert words in done.err
    assert "secret" not in done.err
    assert shop("status", "shop", "--json").out == before


def test_people_compare_the_answers_of_an_evaluation(shop: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", ANSWERS)
    shop("add", "shop", "answers.jsonl")
    assert "have compared none of these answers" in shop("rates", "shop", "answers.jsonl").err
    store = open_store(str(tmp_path / "labels.db"))
    project, ann = find_project(store, "shop"), add_person(store, "ann@example.org")
    while (task := next_task(store, project, ann)) is not None:  # "no" is better than "yes"
        is_left = task.answers[0][0].content.startswith("no")
        judge(store, project, ann, task.assignment, Decision(verdict="step", outcome=-1 if is_left else 1))
    store.close()
    assert "people: ppo over sft 100.0%" in shop("rates", "shop", "answers.jsonl").out
    found = json.loads(shop("rates", "shop", "answers.jsonl", "--baseline", "ppo", "--json").out)
    assert found["baseline"] == "ppo"
    assert (found["rates"]["sft"]["people"]["rate"], found["rates"]["sft"]["people"]["prompts"]) == (0.0, 2)
    assert "0 pairs" in shop("export", "shop", "--out", "train.jsonl").out, "what measures is not trained on"
    assert "2 pairs" in shop("export", "shop", "--out", "heldout.jsonl", "--heldout").out


def test_labels_of_another_tool_come_in_and_go_out(shop: Callable[..., Any], tmp_path: Path) -> None:
    responses = {"q": [{"value": "a", "user_id": "u1"}, {"value": "b", "user_id": "u2"}]}
    record = {"fields": {"prompt": "p", "a": "x", "b": "y"}, "responses": responses}
    (tmp_path / "argilla.json").write_text(json.dumps([record]))
    told = shop("add", "shop", "argilla.json").out
    assert "argilla; 1 item added" in told
    assert "2 labels of 2 people added" in told
    told = shop("export", "shop", "--as", "label-studio", "--out", "studio.json").out
    assert "label-studio cannot say: ties in rankings" in told
    assert "label-studio; 0 items added, 1 were there already" in shop("add", "shop", "studio.json").out


def test_a_session_of_disagreements_is_a_page(
    shop: Callable[..., Any], kedge: Callable[..., Any], tmp_path: Path
) -> None:
    assert kedge("label", "new", "two", "--questions", "pair", "--guideline", "guide.md", "--wanted", "2").code == 0
    write(tmp_path / "pairs.jsonl", PAIRS)
    shop("add", "two", "pairs.jsonl")
    store = open_store(str(tmp_path / "labels.db"))
    project = find_project(store, "two")
    for number in range(2):
        person = add_person(store, f"p{number}@example.org")
        while (task := next_task(store, project, person)) is not None:
            is_left = task.answers[0][0].content.startswith(("good", "bad")[number])
            judge(store, project, person, task.assignment, Decision(verdict="step", outcome=-3 if is_left else 3))
    store.close()
    assert "3 items; 0 labels more" in shop("calibrate", "two", "--out", "session.md").out
    assert "A is better by 3 of 3" in (tmp_path / "session.md").read_text()
    again = shop("calibrate", "two", "--out", "session.md")
    assert again.code == 2, "a page that is there is not overwritten"
    settled = shop(
        "export", "two", "--out", "ties.jsonl", "--settle", "dawid_skene", "--ties", "half", "--margins", "large"
    )
    assert "3 pairs as of 6" in settled.out


def test_an_invitation_is_a_link_and_a_person_can_be_forgotten(shop: Callable[..., Any], tmp_path: Path) -> None:
    done = shop("invite", "shop", "bob@example.org", "--role", "annotator")
    assert len(done.out.split()[0].removeprefix("/join#")) == 64
    write(tmp_path / "pairs.jsonl", PAIRS)
    shop("add", "shop", "pairs.jsonl")
    label_everything(tmp_path)
    assert "3 judgments stay" in shop("forget", "shop", "ann@example.org").out


def test_a_new_guideline_is_a_new_version(shop: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "new.md").write_text("Prefer what is kind.")
    assert "guideline version 2" in shop("guideline", "shop", "new.md").out
    assert "guideline version 2" in shop("status", "shop").out


def test_a_store_that_was_changed_is_told(shop: Callable[..., Any], tmp_path: Path) -> None:
    import sqlite3

    write(tmp_path / "pairs.jsonl", PAIRS)
    shop("add", "shop", "pairs.jsonl")
    label_everything(tmp_path)
    with sqlite3.connect(tmp_path / "labels.db") as connection:
        connection.execute("UPDATE judgment SET outcome = 3 WHERE seq = 2")
    connection.close()
    done = shop("status", "shop", "--verify")
    assert done.code == 1
    assert "judgment: row 2 was changed" in done.out
