"""Manifests and lineage: what is recorded comes back, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from kedge.core.errors import DataError, RunError
from kedge.core.files import hash_bytes
from kedge.runs import Artefact, Manifest, Run, describe, lineage, locate, new_manifest, read_manifest
from kedge.runs.manifest import write_manifest


def test_a_manifest_comes_back_equal(tmp_path: Path) -> None:
    data = Artefact(name="data", kind="demonstrations", path="/data/demos.jsonl", hash="ab12")
    manifest = new_manifest(
        name="hh",
        stage="sft",
        kind="sft",
        seed=7,
        settings={"lr": 1e-5, "layers": (1, 2), "limit": float("inf"), "note": "NaN"},
        device="cpu, 2 threads",
        inputs=[data],
    )
    write_manifest(tmp_path, manifest)
    again = read_manifest(tmp_path)

    assert again == manifest
    assert again.settings == {"lr": 1e-5, "layers": [1, 2], "limit": float("inf"), "note": "NaN"}
    assert (again.name, again.stage, again.kind, again.seed, again.status) == ("hh", "sft", "sft", 7, "running")
    assert again.inputs == (data,)
    assert again.environment.device == "cpu, 2 threads"
    assert again.environment.packages["torch"] == version("torch")
    assert "vllm" not in again.environment.packages
    assert again.created.endswith("+00:00")


def test_the_recipe_hash_is_that_of_the_settings_unless_given() -> None:
    first = new_manifest(name="a", kind="sft", seed=1, settings={"a": 1, "b": 2})
    same = new_manifest(name="b", kind="sft", seed=2, settings={"b": 2, "a": 1})
    other = new_manifest(name="a", kind="sft", seed=1, settings={"a": 1, "b": 3})

    assert first.recipe_hash == hash_bytes(b'{"a":1,"b":2}') == same.recipe_hash
    assert other.recipe_hash != first.recipe_hash
    assert new_manifest(name="a", kind="sft", seed=1, settings={}, recipe_hash="cd").recipe_hash == "cd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, ', r"run\.json is not JSON"),
        ('{"schema": 2}', r"has schema 2; Kedge .* reads schema 1"),
        ("[]", r"has schema None"),
        ('{"schema": 1, "nmae": "x"}', r"name: Field required.*nmae: Unexpected keyword argument"),
    ],
)
def test_a_bad_manifest_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        read_manifest(tmp_path)


def test_an_unknown_status_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(tmp_path, manifest)
    stored = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(stored | {"status": "finnished"}))
    with pytest.raises(RunError, match=r"status: Input should be 'running', 'done'"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_not_a_run_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=f"{name} is not a run: it has no run.json"):
        read_manifest(tmp_path / name)


def _stage(root: Path, stage: str, inputs: list[Artefact], weights: str) -> Path:
    """A finished stage with a model folder of the given content."""
    folder = root / stage
    with Run.create(folder, manifest=new_manifest(name="hh", kind=stage, seed=1, settings={}, inputs=inputs)) as run:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(weights)
        run.finish("done", outputs=[describe("model", "model", folder / "model", run_folder=folder)])
    return folder


def _pipeline(root: Path) -> None:
    """data -> sft -> ppo; ppo reads prompts as well."""
    (root / "demos.jsonl").write_text("demos")
    (root / "prompts.jsonl").write_text("prompts")
    runs = root / "runs" / "hh"
    Run.create(runs, manifest=new_manifest(name="hh", kind="pipeline", seed=1, settings={})).close()
    demos = describe("data", "demonstrations", root / "demos.jsonl", run_folder=runs / "sft")
    sft = _stage(runs, "sft", [demos], "weights of sft")
    prompts = describe("prompts", "prompts", root / "prompts.jsonl", run_folder=runs / "ppo")
    _stage(runs, "ppo", [describe("from", "model", sft / "model", run_folder=runs / "ppo"), prompts], "weights of ppo")


def test_artefacts_are_known_by_content_and_by_a_path_that_moves_along(tmp_path: Path) -> None:
    _pipeline(tmp_path)
    ppo = tmp_path / "runs" / "hh" / "ppo"
    model, prompts = read_manifest(ppo).inputs

    assert (model.name, model.kind, model.path) == ("from", "model", "../sft/model")
    assert prompts.path == str(tmp_path / "prompts.jsonl")
    assert prompts.hash == hash_bytes(b"prompts")
    assert locate(model, ppo) == tmp_path / "runs" / "hh" / "sft" / "model"


def test_lineage_goes_back_to_the_plain_files_even_after_a_move(tmp_path: Path) -> None:
    _pipeline(tmp_path)
    shutil.move(tmp_path / "runs" / "hh", tmp_path / "elsewhere")
    home = tmp_path / "elsewhere"
    links = lineage(home / "ppo")

    assert [(link.child.name, link.artefact.name, link.parent) for link in links] == [
        ("ppo", "from", home / "sft"),
        ("ppo", "prompts", None),
        ("sft", "data", None),
    ]
    assert not any(link.is_stale for link in links)


def test_lineage_sees_that_a_parent_was_made_anew(tmp_path: Path) -> None:
    _pipeline(tmp_path)
    sft = tmp_path / "runs" / "hh" / "sft"
    (sft / "model" / "weights").write_text("other weights")
    anew = describe("model", "model", sft / "model", run_folder=sft)
    write_manifest(sft, replace(read_manifest(sft), outputs=(anew,)))

    assert [link.is_stale for link in lineage(tmp_path / "runs" / "hh" / "ppo")] == [True, False, False]


def test_a_pipeline_is_not_a_parent_of_its_own_stages(tmp_path: Path) -> None:
    _pipeline(tmp_path)
    root = tmp_path / "runs" / "hh"
    (root / "split.jsonl").write_text("made before the stage")
    split = describe("data", "pairs", root / "split.jsonl", run_folder=root / "reward")
    reward = _stage(root, "reward", [split], "weights of reward")

    assert [(link.artefact.path, link.parent) for link in lineage(reward)] == [("../split.jsonl", None)]


def test_runs_that_name_each_other_end(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        link = Artefact(name="from", kind="model", path=f"../{other}/model", hash="0")
        Run.create(
            tmp_path / name, manifest=new_manifest(name=name, kind="sft", seed=1, settings={}, inputs=[link])
        ).close()

    assert [(link.child.name, link.parent) for link in lineage(tmp_path / "a")] == [
        ("a", tmp_path / "b"),
        ("b", tmp_path / "a"),
    ]


def test_an_artefact_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model 'from': there is no file or folder .*nowhere"):
        describe("from", "model", tmp_path / "nowhere", run_folder=tmp_path)
