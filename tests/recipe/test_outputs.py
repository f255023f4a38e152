"""What a run makes does not depend on when it was made, and what it took is counted over all of its parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import KedgeError
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import runs_in
from kedge.runs.manifest import read_manifest
from kedge.stages.shared import loop
from kedge.testing import toy

SHORT = "batch: 8, max_length: 160"
STAGES = f"""
  sft: {{kind: sft, data: demonstrations.jsonl, {SHORT}, samples: 0}}
  plain: {{kind: reward, from: sft, data: pairs.jsonl, if_unfit: go_on, {SHORT}, checkpoints: {{every: 1}}}}
  many: {{kind: reward, from: sft, data: pairs.jsonl, if_unfit: go_on, members: 2, lora: {{rank: 2}}, {SHORT}}}
  eval: {{kind: evaluate, models: [sft], prompts: prompts.jsonl, reward: plain, max_new_tokens: 4}}
"""


def write_recipe(home: Path, stages: str) -> Path:
    make_tiny(home / "tiny", hidden=32, layers=1)
    rows: dict[str, Any] = {
        "demonstrations": toy.demonstrations(16, 1),
        "pairs": toy.pairs(24, 2),
        "prompts": [{"prompt": f"Say {letter}"} for letter in "abc"],
    }
    for name, made in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (home / "a.yaml").write_text(f"kedge: 1\nname: a\nseed: 3\nmodel: ./tiny\ndevice: cpu\nstages:{stages}")
    return home / "a.yaml"


def test_two_equal_runs_have_equal_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(write_recipe(tmp_path, STAGES))
    outputs: list[dict[str, str]] = []
    for number in range(2):  # at the same place: adapters hold the path of their base
        folder = run_recipe(recipe, tmp_path / "runs", is_resumed=False, say=print)
        made = {home.name: read_manifest(home).outputs for home in runs_in(folder)}
        outputs.append({f"{stage}.{one.name}": one.hash for stage, stage_made in made.items() for one in stage_made})
        folder.rename(tmp_path / f"run-{number}")
    assert set(outputs[0]) == {"sft.model", "plain.model", "many.model", "eval.evaluation", "eval.pairs"}
    assert outputs[0] == outputs[1]


def test_training_time_counts_the_parts_before_a_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(write_recipe(tmp_path, STAGES.partition("  many:")[0]))
    real = loop.TrainLoop[Any].finish
    seconds: list[float] = []

    def finish(self: loop.TrainLoop[Any], metrics: Any) -> None:
        real(self, metrics)
        if self.step == 2 and self._context.name == "plain" and not seconds:  # pyright: ignore[reportPrivateUsage]
            seconds.append(0.0)
            raise KedgeError("killed")

    log = loop.TrainLoop[Any]._log  # pyright: ignore[reportPrivateUsage]

    def slow(self: loop.TrainLoop[Any], metrics: Any) -> None:
        self._clock._since -= 100.0  # pyright: ignore[reportPrivateUsage]
        log(self, metrics)

    monkeypatch.setattr(loop.TrainLoop, "finish", finish)
    monkeypatch.setattr(loop.TrainLoop, "_log", slow)
    with pytest.raises(KedgeError, match="killed"):
        run_recipe(recipe, tmp_path / "runs", is_resumed=False, say=print)
    folder = run_recipe(recipe, tmp_path / "runs", is_resumed=True, say=print)
    report = json.loads((folder / "plain/reward-report.json").read_text())
    steps = len((folder / "plain/metrics.jsonl").read_text().splitlines())
    assert steps == 3
    assert re.fullmatch(r"30\d\.\d s", report["facts"]["training time"])
