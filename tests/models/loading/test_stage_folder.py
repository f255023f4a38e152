"""The folder of a stage named where a model is asked for: it stands for the model that the stage made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kedge
from kedge.cli.main import app
from kedge.core.errors import ModelError
from kedge.models.loading.resolve import resolve
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import build, save
from kedge.recipe.schema import load_recipe
from kedge.recipe.wiring import connect
from kedge.stages.rl.judge import find_judge

Write = Callable[[str, str], Path]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a done stage, one with a reward model, one that failed, and one that stopped with a model saved."""
    run = tmp_path / "runs/x"
    kinds = {"sft": "sft", "reward": "reward", "failed": "sft", "stopped": "ppo"}
    for name, kind in kinds.items():
        (run / name).mkdir(parents=True)
        status = name if name in ("failed", "stopped") else "done"
        (run / name / "run.json").write_text(json.dumps({"stage": name, "kind": kind, "status": status}))
    (run / "run.json").write_text(json.dumps({"name": "x", "kind": "pipeline", "status": "failed"}))
    for name in ("sft", "stopped"):
        make_tiny(run / name / "model", hidden=32, layers=1)
    save(build(run / "sft/model", objectives=("reward",), seed=1), run / "reward/model")
    return run


def test_every_door_takes_the_folder_of_a_stage(run: Path, write: Write, tmp_path: Path) -> None:
    assert resolve(run / "sft") == resolve(str(run / "sft")) == run / "sft/model"
    assert find_judge(str(run / "reward")) == run / "reward/model"
    assert kedge.load_model(run / "sft")[0].config.vocab_size == 259
    write("prompts.jsonl", '{"prompt": "Hello"}\n')
    write("pairs.jsonl", '{"prompt": "Hello", "chosen": "Yes", "rejected": "No"}\n')
    file = write(
        "a.yaml",
        "kedge: 1\nname: a\nmodel: runs/x/sft\nstages:\n"
        "  ppo: {kind: ppo, from: runs/x/sft, reward: runs/x/reward, prompts: prompts.jsonl}\n"
        "  eval: {kind: evaluate, models: [runs/x/sft], prompts: prompts.jsonl, reward: runs/x/reward}\n"
        "  mix: {kind: ppo, reward: {kind: model, from: runs/x/reward}, prompts: prompts.jsonl}\n",
    )
    links = connect(load_recipe(file)).links
    sources = [link.source() for name in ("ppo", "eval", "mix") for link in links[name] if not link.is_data]
    assert len(sources) == 6
    assert {Path(source).relative_to(run).as_posix() for source in sources} == {"sft/model", "reward/model"}
    commands = [
        ["sample", run / "sft", "--prompt", "Hello", "--max-new-tokens", "2"],
        ["score", run / "reward", tmp_path / "pairs.jsonl", "--to", tmp_path / "scores.jsonl"],
    ]
    for command in commands:
        result = CliRunner().invoke(app, [str(part) for part in command])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("door", [resolve, lambda place: find_judge(str(place)), kedge.load_model])
def test_a_stage_that_is_not_done_is_named(run: Path, door: Callable[[Path], object]) -> None:
    failed = r"failed: stage 'failed' is not done \(it has the status 'failed'\), so it has no finished model; go on"
    with pytest.raises(ModelError, match=failed):
        door(run / "failed")
    saved = re.escape(f"what it has saved all the same is in {run / 'stopped/model'}: name that to use it")
    with pytest.raises(ModelError, match=saved):
        door(run / "stopped")


def test_a_whole_run_is_told_which_stages_have_models(run: Path) -> None:
    with pytest.raises(ModelError, match=r"x is a whole run, not a model; name one of its stages: .*/reward, .*/sft"):
        resolve(run)
