"""A recipe with an `evaluate` stage as a user runs it: two models, and a Python function that prefers one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

Kedge = Callable[..., Any]

RECIPE = """
kedge: 1
name: compare
seed: 5
model: tiny
device: cpu
stages:
  sft:
    kind: sft
    data: demos.jsonl
    epochs: 20
    batch: 16
    max_length: 48
    samples: 0
    optimiser: {lr: 1e-2}
  eval:
    kind: evaluate
    models: [tiny, sft]
    prompts: ask.jsonl
    reward: {kind: function, path: "mine.py:agrees"}
    gold: {kind: exact}
    answers: 2
    max_new_tokens: 12
    dtype: float32
"""
REWARD = """
def agrees(answers):
    # The third prompt is not scored; unfinished answers get what they have.
    return [None if "three" in a.prompt[-1][1] else float(a.text.startswith("yes")) for a in answers]
"""
WORDS = ("one", "two", "three", "four", "five", "six")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    demos = [{"prompt": f"Is {word} right?", "completion": "yes"} for word in ("seven", "eight", "nine", "ten") * 8]
    asks = [{"prompt": f"Is {word} right?", "answer": "yes"} for word in WORDS]
    for name, rows in (("demos", demos), ("ask", asks)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_trained_model_beats_the_one_it_came_from(kedge: Kedge, home: Path) -> None:
    done = kedge("run", "recipe.yaml")
    assert done.code == 0, done.err
    folder = home / "runs/compare/eval"

    answers = rows(folder / "answers.jsonl")
    assert [one["id"] for one in answers] == [
        f"{model}-{prompt}-{number}" for model in ("tiny", "sft") for prompt in range(6) for number in range(2)
    ]
    for one in answers:
        asked = one["prompt"][0]["content"]
        scored = None if "three" in asked else float(one["answer"].startswith("yes"))
        assert one["scores"] == {"reward": scored, "gold": float(one["answer"] == "yes")}
    mean = {
        model: fmean(one["scores"]["reward"] for one in answers if one["model"] == model and "-2-" not in one["id"])
        for model in ("tiny", "sft")
    }
    assert mean["tiny"] < 0.2 < 0.8 < mean["sft"]

    numbers = json.loads((folder / "evaluation.json").read_text())
    assert (numbers["baseline"], numbers["prompts"], numbers["answers_per_prompt"]) == ("tiny", 6, 2)
    for model in ("tiny", "sft"):
        found = numbers["models"][model]["scores"]["reward"]
        assert (found["mean"]["mean"], found["unscored"]) == (pytest.approx(mean[model]), 2)
        lengths = [one["length"] for one in answers if one["model"] == model]
        assert numbers["models"][model]["length"]["mean"] == pytest.approx(fmean(lengths))
    against = numbers["comparisons"]["sft"]["reward"]
    assert (against["win_rate"]["prompts"], against["left_out"]) == (5, 1)
    assert against["win_rate"]["low"] > 0.5
    assert against["win_rate"]["wins"] + against["win_rate"]["ties"] + against["win_rate"]["losses"] == pytest.approx(1)
    kl = [one["kl"] for one in answers if one["model"] == "sft"]
    assert numbers["models"]["sft"]["kl"]["mean"] == pytest.approx(fmean(kl))
    assert fmean(kl) > 5  # three letters and an end that a random model finds by chance
    assert numbers["models"]["tiny"]["kl"] is None

    again = kedge(
        *("sample", "runs/compare/sft", "--prompts", "ask.jsonl", "-n", "2", "--max-new-tokens", "12"),
        *("--seed", str(answers[0]["seed"]), "--dtype", "float32", "--device", "cpu", "--json"),
    )
    assert [one["answer"] for one in json.loads(again.out)] == [one["answer"] for one in answers[12:]]

    assert "win rate over tiny" in done.out
    assert "reward: 4 of 24 answers have no score so far: the function gave None (4x)" in done.out


def test_the_pairs_are_data_for_the_next_round(kedge: Kedge, home: Path) -> None:
    assert kedge("run", "recipe.yaml").code == 0
    folder = home / "runs/compare/eval"
    pairs = rows(folder / "pairs.jsonl")
    by_id = {one["id"]: one for one in rows(folder / "answers.jsonl")}
    assert pairs
    for pair in pairs:
        better, worse = by_id[pair["chosen_id"]], by_id[pair["rejected_id"]]
        assert pair["chosen"] == [{"role": "assistant", "content": better["answer"]}]
        assert pair["rejected"] == [{"role": "assistant", "content": worse["answer"]}]
        assert pair["prompt"] == better["prompt"] == worse["prompt"]
        assert (pair["chosen_score"], pair["rejected_score"]) == (1.0, 0.0)
    counts = json.loads((folder / "evaluation.json").read_text())["pairs"]
    assert counts == {"written": len(pairs), "ties": 5 - len(pairs), "unpaired": 1}
    checked = kedge("data", "check", str(folder / "pairs.jsonl"), "--json")
    assert checked.code == 0, checked.out
    converted = kedge("data", "convert", str(folder / "pairs.jsonl"), "--kind", "rankings", "--to", "r.jsonl")
    assert f"wrote {len(pairs)} rankings to r.jsonl" in converted.out


def test_a_second_run_reads_the_answers_of_the_first(kedge: Kedge, home: Path) -> None:
    kedge("run", "recipe.yaml")
    again = kedge("run", "recipe.yaml", "--set", "name=again")
    assert again.code == 0, again.err
    assert "tiny: 12 answers, read from the cache" in again.out
    one, other = (home / "runs" / name / "eval" for name in ("compare", "again"))
    assert (one / "evaluation.json").read_text() == (other / "evaluation.json").read_text()
    assert (one / "answers.jsonl").read_text() == (other / "answers.jsonl").read_text()


def test_answers_are_compared_without_a_judge_and_without_kl(kedge: Kedge, home: Path) -> None:
    text = RECIPE.replace("    reward: {kind: function", "    top_p: 0.9 # {kind: function").replace(
        "    gold: {", "    # {"
    )
    (home / "recipe.yaml").write_text(text)
    assert "nobody scores the answers" in kedge("check", "recipe.yaml").out
    done = kedge("run", "recipe.yaml")
    assert done.code == 0, done.err
    numbers = json.loads((home / "runs/compare/eval/evaluation.json").read_text())
    assert numbers["comparisons"] == {"sft": {}}
    assert numbers["models"]["sft"]["scores"] == {}
    assert numbers["models"]["sft"]["kl"] is None
    assert "KL is not measured: top_p or top_k cut the distribution" in done.out
    assert (home / "runs/compare/eval/pairs.jsonl").read_text() == ""


def test_a_model_may_be_named_once(kedge: Kedge, home: Path) -> None:
    (home / "recipe.yaml").write_text(RECIPE.replace("models: [tiny, sft]", "models: [tiny, sft, tiny]"))
    done = kedge("run", "recipe.yaml")
    assert done.code == 2
    assert "tiny: named more than once" in done.err
    assert not (home / "runs").exists()
