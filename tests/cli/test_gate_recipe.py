"""A recipe that ends with a gate: exams and an evaluation of two models, their rules, a badcase, exit code 3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]

RECIPE = """
kedge: 1
name: gated
seed: 5
model: tiny
device: cpu
stages:
  sft: {kind: sft, data: demos.jsonl, epochs: 2, batch: 16, max_length: 48, samples: 0, optimiser: {lr: 1e-2}}
  eval: {kind: evaluate, models: [tiny, sft], prompts: ask.jsonl, gold: {kind: exact}, max_new_tokens: 6}
  exam: {kind: exam, models: [tiny, sft], exams: [own.yaml]}
  gate: {kind: gate, candidate: sft, baseline: tiny, from: [eval, exam], max_new_tokens: 4, undecided: allow}
"""
EXAM = """
kedge_exam: 1
name: mine
kind: choice
items: questions.jsonl
"""
RULES = "keep: {mine: 0.2}\nlimit: {length.ratio: 50}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    files = {
        "demos": [{"prompt": f"Is {n} right?", "completion": "yes"} for n in range(32)],
        "ask": [{"prompt": f"Is {n} good?", "answer": "yes"} for n in range(24)],
        "questions": [
            {"id": str(n), "question": f"Is {n} odd?", "choices": ["yes", "no"], "answer": 1 - n % 2} for n in range(40)
        ],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "own.yaml").write_text(EXAM)
    (tmp_path / "gate.yaml").write_text(RULES)
    return tmp_path


@pytest.mark.slow
def test_a_recipe_ends_with_a_verdict_and_a_badcase_that_was_trained_on_counts_by_its_siblings(
    kedge: Kedge, home: Path
) -> None:
    (home / "gate.yaml").write_text("keep: {mine: 0.2, mien: 0.2}\nimprove: {win_rate: {judge: reward}}\n")
    refused = kedge("run", "recipe.yaml")
    assert refused.code == 2
    assert "no exam stage of `from` takes 'mien' (did you mean 'mine'?)" in refused.err
    assert "no evaluate stage of `from` has `reward`" in refused.err
    assert not (home / "runs").exists()

    (home / "gate.yaml").write_text(RULES)
    answers = home / "bad.jsonl"
    rows = [
        {"id": "a", "prompt": "Is 7 right?", "answer": "no"},  # trained on, and kept by a sibling
        {"id": "b", "prompt": "Is 8 right?", "answer": "no"},  # trained on, without a sibling
        {"id": "c", "prompt": "Is seven a number of the week?", "answer": "no"},
    ]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sibling = ("--sibling", "Would you call seven right?")
    for name, more in (("a", sibling), ("b", ()), ("c", ())):
        done = kedge("badcase", "add", "bad.jsonl", name, "--why", "no", "--check", "lacks: no", *more)
        assert done.code == 0, done.err
    done = kedge("run", "recipe.yaml")
    assert done.code == 0, done.err + done.out
    verdict = json.loads((home / "runs/gated/gate/verdict.json").read_text())
    results = {result["metric"]: result for result in verdict["results"]}
    assert results["mine"]["items"] == 40
    assert results["length.ratio"]["items"] == 24
    trained, without, fresh = verdict["badcases"]["results"]
    assert [asked["is_trained_on"] for asked in trained["asked"]] == [True, False]
    assert (without["verdict"], [asked["is_trained_on"] for asked in without["asked"]]) == ("undecided", [True])
    assert [asked["is_trained_on"] for asked in fresh["asked"]] == [False]
    assert verdict["verdict"] == "undecided"
    assert verdict["judge"]["eval.gold"]["settings"]["kind"] == "exact"
    assert verdict["candidate"]["path"].endswith("sft/model")
    assert "verdict: undecided" in done.out

    assert kedge("promote", "runs/gated/sft", "--as", "prod").code == 3
    (home / "gate.yaml").write_text("keep: {mine: 0.7}\n")
    again = kedge("gate", "runs/gated/sft", "tiny", "--from", "runs/gated/exam", "--from", "runs/gated/eval",
                  "--badcases", "none", "--max-new-tokens", "4", "--device", "cpu")  # fmt: skip
    assert again.code == 0, again.err
    assert kedge("promote", "runs/gated/sft", "--as", "prod").code == 0


def test_a_failing_gate_ends_the_run_with_3(kedge: Kedge, home: Path) -> None:
    """Of a candidate that is there already: nothing is trained."""
    make_tiny(home / "other", seed=5, hidden=32, layers=1)
    without_training = [line for line in RECIPE.replace("sft", "./other").splitlines() if "data: demos" not in line]
    (home / "recipe.yaml").write_text("\n".join(without_training))
    (home / "gate.yaml").write_text("keep: {mien: 0.2}\n")
    refused = kedge("run", "recipe.yaml")
    assert refused.code == 2
    assert "line 1: keep.mien: no exam stage of `from` takes 'mien' (did you mean 'mine'?)" in refused.err

    without_exam = [line for line in without_training if "kind: exam" not in line]
    (home / "recipe.yaml").write_text("\n".join(without_exam).replace("[eval, exam]", "[eval]"))
    (home / "ask.jsonl").write_text('{"prompt": "Is it good?", "answer": "yes"}\n' * 4)
    (home / "gate.yaml").write_text("limit: {length.ratio: 0.01}\n")
    done = kedge("run", "recipe.yaml")
    assert done.code == 3, done.err
    assert "the gate says fail: length.ratio" in done.err
    assert json.loads((home / "runs/gated/gate/verdict.json").read_text())["verdict"] == "fail"
    assert json.loads((home / "runs/gated/gate/run.json").read_text())["status"] == "stopped"
