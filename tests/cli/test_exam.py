"""`kedge exam`: models, the list, and files that are brought."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]
FEW = ("--on", "knowledge", "--limit", "3", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    make_tiny(tmp_path / "model", seed=5, hidden=32, layers=1)


def test_a_table_and_files(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("exam", "./model", *FEW, "--to", "out", "--groups")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert any(line.startswith("knowledge.letter ") and "3 items, ECE" in line for line in lines)
    assert any("subject: " in line for line in lines)
    assert any("with template chat" in line and "with plain" in line for line in lines)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["answers.jsonl", "exam.json", "items.jsonl"]
    again = kedge("exam", "take", "./model", *FEW, "--to", "out")
    assert again.code == 2
    assert "this file is there already" in again.err


def test_numbers_for_machines_are_the_same_each_time(kedge: Kedge) -> None:
    first, again = (json.loads(kedge("exam", "./model", *FEW, "--json").out) for _ in range(2))
    assert first == again
    assert first["results"][0]["exam"] == "knowledge"


def test_what_cannot_be_is_refused_before_a_model_is_loaded(kedge: Kedge) -> None:
    for arguments, words in (
        (("nowhere", "--on", "knowlege"), "did you mean 'knowledge'?"),
        (("nowhere", "--on", "mmlu"), "kedge exam get mmlu --from FOLDER"),
        (("nowhere", "--on", "own.yaml"), "there is no such exam"),
        (("./model", "./model", "--on", "knowledge"), "named more than once"),
        (("get", "piqa", "--from", "nowhere"), "there is no such folder or file"),
    ):
        done = kedge("exam", *arguments)
        assert (done.code, words in done.err) == (2, True), done.err


def test_an_exam_is_brought_listed_and_taken(kedge: Kedge, tmp_path: Path) -> None:
    rows = [{"id": str(n), "question": "Q", "choices": ["a", "b"], "answer": n % 2} for n in range(4)]
    (tmp_path / "piqa-valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = kedge("exam", "get", "piqa", "--from", ".")
    assert done.code == 0, done.err
    assert "licence: AFL-3.0" in done.out
    assert "4 items" in done.out
    assert "piqa " in kedge("exam", "list").out
    taken = json.loads(kedge("exam", "./model", "--on", "piqa", "--device", "cpu", "--json").out)
    assert {result["items"] for result in taken["results"]} == {4}
