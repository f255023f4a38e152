"""`kedge sample`: answers on the screen, as JSON and in files that other commands read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]
SHORT = ("--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    make_tiny(tmp_path / "model", seed=5, hidden=32)


def test_answers_are_shown_below_their_prompt(kedge: Kedge) -> None:
    done = kedge("sample", "./model", "-p", "Which [day]?", "-p", "Hi", "-n", "2", *SHORT)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line for line in lines if line in ("Which [day]?", "Hi")] == ["Which [day]?", "Hi"]
    assert done.out.count("tokens") == 4


def test_the_same_seed_gives_the_same_answers(kedge: Kedge) -> None:
    one, again, other = (
        json.loads(kedge("sample", "./model", "-p", "Hi", "--seed", seed, "--json", *SHORT).out) for seed in "334"
    )
    assert one == again
    assert one[0]["answer"] != other[0]["answer"]
    assert (one[0]["seed"], other[0]["seed"]) == (3, 4)
    assert one[0]["length"] <= 8


def test_a_file_in_and_a_file_out(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "ask.jsonl").write_text('{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    done = kedge("sample", "./model", "--prompts", "ask.jsonl", "-n", "3", "--to", "said.jsonl", *SHORT)
    assert (done.code, done.out.strip()) == (0, "wrote 6 answers to said.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert rows[5]["prompt"] == [{"role": "user", "content": "How?"}]


def test_greedy_answers_are_all_alike(kedge: Kedge) -> None:
    done = kedge("sample", "./model", "-p", "Hi", "-n", "3", "--top-k", "1", "--json", *SHORT)
    assert len({row["answer"] for row in json.loads(done.out)}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./model",), "nothing to answer: give --prompt TEXT"),
        (
            ("./model", "-p", "Hi", "--temperature", "0"),
            "--temperature: Input should be greater than or equal to",
        ),
        (("./model", "-p", "Hi", "--to", "a.txt"), "--to a.txt: the name must end in .jsonl"),
        (("./modle", "-p", "Hi"), "no model folder at"),
    ],
)
def test_bad_input_is_refused(kedge: Kedge, arguments: tuple[str, ...], message: str) -> None:
    done = kedge("sample", *arguments)
    assert done.code == 2
    assert message in done.err


def test_without_a_length_an_answer_is_as_long_as_the_window_allows(kedge: Kedge, tmp_path: Path) -> None:
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 48}))
    done = kedge("sample", "./model", "-p", "Hi", "--json", "--dtype", "float32", "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)[0]["length"] < 48
