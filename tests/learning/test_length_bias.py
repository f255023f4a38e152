"""A reward model that has learnt length instead of quality is caught, and length control makes it learn quality."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import load
from kedge.runs.folder import status_of

WORDS = ("red", "blue", "old", "new", "big", "low")
RECIPE = """
kedge: 1
name: bias
model: ./tiny
stages:
  reward:
    kind: reward
    data: train.jsonl
    heldout: heldout.jsonl
    batch: 8
    micro_batch: 8
    epochs: 2
    max_length: 128
    optimiser: {lr: 3e-3}
"""


def pairs(count: int, seed: int, *, longer_wins: float, better_wins: float) -> list[dict[str, str]]:
    """A long and a short answer, one of them marked good and the other bad, at random.

    The longer one is chosen so often where it is the good one, too; where it is the bad one, the odds of both rules
    are multiplied, as if length and quality pulled on the same judge.
    """
    rng = Random(seed)
    odds_length, odds_quality = longer_wins / (1 - longer_wins), better_wins / (1 - better_wins)
    made: list[dict[str, str]] = []
    for number in range(count):
        marks = rng.sample(["good", "bad"], 2)
        sizes = (rng.randrange(8, 14), rng.randrange(1, 5))
        longer, shorter = (
            " ".join([mark, *(rng.choice(WORDS) for _ in range(size))]) for mark, size in zip(marks, sizes, strict=True)
        )
        odds = odds_length * (odds_quality if marks[0] == "good" else 1 / odds_quality)
        chosen, rejected = (longer, shorter) if rng.random() < odds / (1 + odds) else (shorter, longer)
        made.append({"prompt": f"question {seed} {number}", "chosen": chosen, "rejected": rejected})
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "tiny", hidden=32, layers=2)
    (tmp_path / "bias.yaml").write_text(RECIPE)
    return tmp_path / "bias.yaml"


def report(run: Path) -> dict[str, Any]:
    return json.loads((run / "reward/reward-report.json").read_text())


def test_a_model_of_length_stops_the_run_and_goes_on_only_when_told_to(
    kedge: Callable[..., int], rows: Callable[..., Path], recipe: Path, tmp_path: Path
) -> None:
    rows("train.jsonl", pairs(240, 1, longer_wins=0.95, better_wins=0.5))
    rows("heldout.jsonl", pairs(150, 2, longer_wins=0.95, better_wins=0.5))

    assert kedge("run", recipe) == 3
    run = tmp_path / "runs/bias"
    found = report(run)
    assert found["accuracy"]["value"] > 0.9  # by its accuracy alone it is a good model
    assert not found["is_fit"]
    assert [one["code"] for one in found["findings"] if one["level"] == "fatal"] == ["length.disguise"]
    assert (status_of(run), status_of(run / "reward")) == ("stopped", "stopped")
    assert load(run / "reward/model").objectives == ("reward",)

    assert kedge("run", recipe, "--resume") == 3  # nothing has changed
    saved = (run / "reward/model/model.safetensors").read_bytes()
    assert kedge("run", recipe, "--resume", "--set", "stages.reward.if_unfit=go_on") == 0
    assert (status_of(run), status_of(run / "reward")) == ("done", "done")
    assert (run / "reward/model/model.safetensors").read_bytes() == saved
    assert report(run)["accuracy"] == found["accuracy"]


@pytest.mark.slow
def test_length_control_raises_the_accuracy_where_the_longer_answer_lost(
    kedge: Callable[..., int], rows: Callable[..., Path], recipe: Path, tmp_path: Path
) -> None:
    rows("train.jsonl", pairs(500, 1, longer_wins=0.8, better_wins=0.7))
    rows("heldout.jsonl", pairs(200, 2, longer_wins=0.5, better_wins=0.95))
    against: dict[str, float] = {}
    for control in ("none", "balance", "residual"):
        told = [f"stages.reward.loss.length_control={control}", "stages.reward.if_unfit=go_on", f"name={control}"]
        assert kedge("run", recipe, "--no-check", *(part for one in told for part in ("--set", one))) == 0
        against[control] = report(tmp_path / "runs" / control)["length"]["longer_rejected"]["model"]["value"]
    assert against["none"] < 0.3
    assert against["balance"] > 0.6
    assert against["residual"] > 0.6
