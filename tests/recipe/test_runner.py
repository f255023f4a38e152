"""Running a recipe: folders, lineage, resuming, refusing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import ConfigError, ContractStop, DataError, RunError
from kedge.data import prepare as prepare_module
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import Recipe, load_recipe
from kedge.runs.folder import Run, status_of
from kedge.runs.manifest import read_manifest

Write = Callable[[str, str], Path]

PAIRS = "".join(
    json.dumps({"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}) + "\n" for i in range(10)
)
RECIPE = (
    "kedge: 1\nname: prep\nseed: 3\nmodel: tiny\nstages:\n  prepare: {kind: data, files: [pairs.jsonl], heldout: 0.2}\n"
)


@pytest.fixture
def recipe(write: Write) -> Recipe:
    write("pairs.jsonl", PAIRS)
    return load_recipe(write("a.yaml", RECIPE))


def run(recipe: Recipe, folder: Path, *, is_resumed: bool = False) -> list[str]:
    said: list[str] = []
    run_recipe(recipe, folder, is_resumed=is_resumed, say=said.append)
    return said


def test_a_run_leaves_manifests_with_lineage_and_outputs(recipe: Recipe, tmp_path: Path) -> None:
    said = run(recipe, tmp_path / "runs")
    assert said[0] == f"run folder: {tmp_path / 'runs/prep'}"
    pipeline, stage = read_manifest(tmp_path / "runs/prep"), read_manifest(tmp_path / "runs/prep/prepare")
    assert (pipeline.status, pipeline.kind, pipeline.settings) == ("done", "pipeline", recipe.resolved())
    assert (stage.status, stage.kind, stage.seed) == ("done", "data", 3)
    assert [(one.name, Path(one.path).name) for one in stage.inputs] == [("files", "pairs.jsonl")]
    assert [(one.name, one.path) for one in stage.outputs] == [
        ("train", "data/train.jsonl"),
        ("heldout", "data/heldout.jsonl"),
    ]
    lines = (tmp_path / "runs/prep/prepare/data/train.jsonl").read_text().splitlines()
    assert len(lines) == 8


def test_a_second_run_of_the_same_name_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"there is a run of this name already \(done\); use --resume"):
        run(recipe, tmp_path / "runs")


def test_resuming_keeps_what_is_done(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "runs")
    made = tmp_path / "runs/prep/prepare/data/train.jsonl"
    before = made.stat().st_mtime_ns
    assert "prepare: done before, kept" in run(recipe, tmp_path / "runs", is_resumed=True)
    assert made.stat().st_mtime_ns == before


def test_resuming_nothing_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run to resume"):
        run(recipe, tmp_path / "runs", is_resumed=True)
    assert not (tmp_path / "runs").exists()


def test_resuming_with_another_recipe_names_what_changed(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "runs")
    changed = load_recipe(recipe.file, ["stages.prepare.heldout=0.3"])
    with pytest.raises(ConfigError, match=r"stages\.prepare\.heldout: was 0\.2, is 0\.3"):
        run(changed, tmp_path / "runs", is_resumed=True)


def test_a_run_of_version_0_1_is_not_resumed(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "runs")
    file = tmp_path / "runs/prep/run.json"
    manifest = json.loads(file.read_text())
    for version, is_refused in (("0.1.0", True), ("0.1.9rc1", True), ("0.2.0", False), ("1.0", False)):
        file.write_text(json.dumps({**manifest, "environment": {**manifest["environment"], "kedge": version}}))
        if is_refused:
            with pytest.raises(ConfigError, match=rf"made by Kedge {version}, whose checkpoints have another layout"):
                run(recipe, tmp_path / "runs", is_resumed=True)
        else:
            run(recipe, tmp_path / "runs", is_resumed=True)


def test_resuming_with_other_data_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "runs")
    (tmp_path / "pairs.jsonl").write_text(PAIRS.replace("good 3", "better 3"))
    with pytest.raises(ConfigError, match="inputs of stage 'prepare' have changed since it was started"):
        run(recipe, tmp_path / "runs", is_resumed=True)


@pytest.mark.parametrize(
    ("error", "status", "event"),
    [
        (DataError("no good"), "failed", "DataError: no good"),
        (ContractStop("KL 13 passed the limit 12"), "stopped", "KL 13 passed the limit 12"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
def test_a_stage_that_ends_badly_says_how_and_can_be_resumed(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: str,
    event: str | None,
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("kedge.stages.data.run.prepare", fail)
        with pytest.raises(type(error)):
            run(recipe, tmp_path / "runs")
    home = tmp_path / "runs/prep/prepare"
    assert (status_of(home.parent), status_of(home)) == (status, status)
    messages = [one["message"] for one in Run.open(home, for_writing=False).read_events()]
    assert messages == ([event] if event else [])
    seen: list[str] = []
    whole = prepare_module.prepare

    def look_around(*arguments: Any, **settings: Any) -> Any:
        seen.extend((status_of(home.parent), status_of(home)))
        return whole(*arguments, **settings)

    monkeypatch.setattr("kedge.stages.data.run.prepare", look_around)
    run(recipe, tmp_path / "runs", is_resumed=True)
    assert seen == ["running", "running"]
    assert (status_of(home.parent), status_of(home)) == ("done", "done")


def test_two_writers_of_one_run_are_refused(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_again(*_: object, **__: object) -> Any:
        with pytest.raises(RunError, match=r"runs/prep is being written by process \d+"):
            run(recipe, tmp_path / "runs", is_resumed=True)
        raise DataError("enough")

    monkeypatch.setattr("kedge.stages.data.run.prepare", run_again)
    with pytest.raises(DataError, match="enough"):
        run(recipe, tmp_path / "runs")


def test_a_stage_that_cannot_run_is_refused_before_anything_starts(recipe: Recipe, tmp_path: Path) -> None:
    kinds = {name: replace(stage, run=None) for name, stage in recipe.kinds.items()}
    with pytest.raises(ConfigError, match=r"can check these stages but not run them: prepare; nothing was started"):
        run(replace(recipe, kinds=kinds), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_tells_who_asked_to_be_told(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("pairs.jsonl", PAIRS)
    heard = tmp_path / "heard.json"
    program = f"import sys; open({str(heard)!r}, 'w').write(sys.stdin.read())"
    command = json.dumps([sys.executable, "-c", program])
    recipe = load_recipe(write("a.yaml", RECIPE + f"alerts: {{level: fatal, commands: [{{run: {command}}}]}}\n"))

    def break_down(*_: Any, **__: Any) -> None:
        raise DataError("no more pairs")

    monkeypatch.setattr("kedge.stages.data.run.prepare", break_down)
    with pytest.raises(DataError, match="no more pairs"):
        run(recipe, tmp_path / "runs")
    told = json.loads(heard.read_text())
    assert (told["level"], told["code"], told["run"]) == ("fatal", "run.failed", "prep/prepare")
    quiet = load_recipe(write("a.yaml", RECIPE))
    monkeypatch.undo()
    run(quiet, tmp_path / "runs", is_resumed=True)  # who is told may change
