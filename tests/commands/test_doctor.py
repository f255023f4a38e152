"""From the folder of a run to a diagnosis of each stage, and to a diff and a command that a recipe takes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.doctor import examine, next_command, recipe_diff
from kedge.core.errors import ConfigError
from kedge.monitor.doctor import Change
from kedge.recipe.layers import load_layers
from kedge.runs import Run, new_manifest

PPO = {"kind": "ppo", "kl": {"start": 0.0, "limit": None}, "sampling": {"max_new_tokens": 64}}
STEADY = {"reward/mean": 1.0, "kl/mean": 0.05, "length/truncated": 0.1}


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[..., Path]:
    """A pipeline `hh` with a stage of imitation and one of PPO, whose metrics are given."""

    def make(ppo: Callable[[int], dict[str, float]]) -> Path:
        folder = tmp_path / "hh"
        Run.create(folder, manifest=new_manifest(name="hh", kind="pipeline", seed=1, settings={})).close()
        stages: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, float]]]] = {
            "sft": ({"kind": "sft"}, lambda step: {"train/loss": 2.0 - 0.02 * step}),
            "ppo": (PPO, ppo),
        }
        for name, (settings, row) in stages.items():
            manifest = new_manifest(name="hh", stage=name, kind=settings["kind"], seed=1, settings=settings)
            with Run.create(folder / name, manifest=manifest) as run:
                for step in range(1, 41):
                    run.log(row(step), step)
                run.finish("done")
        return folder

    return make


def test_every_stage_is_examined_in_its_order(pipeline: Callable[..., Path]) -> None:
    found = examine(pipeline(lambda step: STEADY))
    assert [(one.stage, one.kind, one.status, one.diagnosis.is_healthy) for one in found] == [
        ("sft", "sft", "done", True),
        ("ppo", "ppo", "done", True),
    ]
    assert next_command(found) is None
    assert [one.as_dict()["recipe"] for one in found] == [[], []]


def test_one_stage_may_be_named(pipeline: Callable[..., Path]) -> None:
    (found,) = examine(pipeline(lambda step: STEADY | {"length/truncated": 1.0}) / "ppo")
    assert (found.stage, found.diagnosis.causes[0].code) == ("ppo", "no_ends")
    assert list(recipe_diff("ppo", found.diagnosis.changes)) == [
        " stages:",
        "   ppo:",
        "     sampling:",
        "-      max_new_tokens: 64",
        "+      max_new_tokens: 100",
    ]


def test_a_run_is_read_and_not_touched(pipeline: Callable[..., Path]) -> None:
    folder = pipeline(lambda step: STEADY)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    examine(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_command_sets_what_the_diff_says(pipeline: Callable[..., Path], tmp_path: Path) -> None:
    found = examine(pipeline(lambda step: STEADY | {"kl/mean": 3 * 1.2**step}))
    command = next_command(found)
    assert command is not None
    words = shlex.split(command)
    assert words[:4] == ["kedge", "run", "RECIPE", "--set"]
    recipe = tmp_path / "r.yaml"
    recipe.write_text("kedge: 1\nname: hh\nstages: {ppo: {kind: ppo, kl: {start: 0}}}\n")
    tree = load_layers(recipe, [word for word in words[3:] if word != "--set"])
    assert tree.values["name"] == "hh-2"
    assert tree.values["stages"]["ppo"]["kl"] == {"start": 0.05, "limit": 10.0}


def test_settings_of_a_section_stand_together() -> None:
    changes = [
        Change(key="kl.start", old=0.05, new=0.1, why="", area="kl"),
        Change(key="actor.lr", old=1e-4, new=3e-5, why="", area="learning rate"),
        Change(key="kl.limit", old=None, new=12.0, why="", area="kl"),
        Change(key="epochs", old=2, new=1, why="", area="learning rate"),
        Change(key="scores.normalise", old="none", new="scale", why="", area="reward scale"),
    ]
    assert list(recipe_diff("p", changes)) == [
        " stages:",
        "   p:",
        "     kl:",
        "-      start: 0.05",
        "+      start: 0.1",
        "-      limit: null",
        "+      limit: 12.0",
        "     actor:",
        "-      lr: 0.0001",
        "+      lr: 3e-5",
        "-    epochs: 2",
        "+    epochs: 1",
        "     scores:",
        "-      normalise: none",
        "+      normalise: scale",
    ]


def test_a_folder_that_is_no_run_is_bad_input(tmp_path: Path, pipeline: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        examine(tmp_path)
    folder = pipeline(lambda step: STEADY)
    with pytest.raises(ConfigError, match="did you mean 'hh'"):
        examine(tmp_path / "hhh")
    journal = folder / "ppo" / "metrics.jsonl"
    journal.write_bytes(b"nonsense\n" + journal.read_bytes())
    with pytest.raises(ConfigError, match=r"metrics.jsonl:1"):
        examine(folder)


def test_a_reward_stage_is_judged_by_its_report(tmp_path: Path) -> None:
    manifest = new_manifest(name="hh", stage="reward", kind="reward", seed=1, settings={"kind": "reward"})
    with Run.create(tmp_path / "reward", manifest=manifest) as run:
        for step in range(1, 41):
            run.log({"train/loss": 0.6 + 0.01 * (-1) ** step}, step)
        run.finish("done")
    report = tmp_path / "reward" / "reward-report.json"
    assert [one.diagnosis.causes[0].code for one in examine(tmp_path / "reward")] == ["train.still"]
    report.write_text('{"is_fit": true, "findings": [], "accuracy": {"value": 0.9, "low": 0.88}}')
    assert [one.diagnosis.is_healthy for one in examine(tmp_path / "reward")] == [True]
    report.write_text("{")
    with pytest.raises(ConfigError, match=r"reward-report\.json: damaged"):
        examine(tmp_path / "reward")
