"""A package from elsewhere adds one part of each kind: installed by pip, named in a recipe, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.schema import load_recipe
from kedge.runs.manifest import read_manifest

SOURCE = Path(__file__).parent / "kedge_example"
PAGE = Path(__file__).parents[2] / "docs/plugins.md"
PARTS = {
    "stages": "short_prompts",
    "algorithms": "median",
    "rewards": "brevity",
    "generators": "capped",
    "trackers": "lines",
    "roles": "full_precision",
}
FILES = ["pyproject.toml", *(f"kedge_example/{name}.py" for name in PARTS.values()), "tests/test_contracts.py"]
RECIPE: dict[str, Any] = {
    "kedge": 1,
    "name": "example",
    "seed": 3,
    "device": "cpu",
    "trackers": {"lines": {"file": "numbers.txt"}},
    "stages": {
        "short": {"kind": "short_prompts", "data": "prompts.jsonl", "max_words": 3},
        "median": {
            "kind": "group",
            "prompts": "short",
            "method": {"kind": "median", "clip": 0.1},
            "reward": {"kind": "function", "path": "brevity", "options": {"longest": 40}},
            "generator": {"kind": "capped", "tokens": 3},
            "roles": "full_precision",
            "iterations": 2,
            "batch": 2,
            "micro_batch": 8,
            "max_prompt_tokens": 60,
            "sampling": {"max_new_tokens": 8},
            "actor": {"lr": 1e-3},
        },
    },
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package to."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(target), str(SOURCE)], check=True)
    return target


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process too, the package is installed."""
    monkeypatch.syspath_prepend(str(installed))
    plugins._installed.cache_clear()
    yield
    plugins._installed.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "kedge_example"]:
        del sys.modules[name]


def kedge(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in another process, which has the package on its path."""
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "kedge.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of `RECIPE`."""
    folder = tmp_path_factory.mktemp("run")
    model = make_tiny(folder / "tiny", hidden=32, layers=2)
    prompts = ["Say a", "Say b", "Say c now", "Say d and then say e"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "recipe.yaml").write_text(json.dumps({**RECIPE, "model": str(model)}))
    done = kedge(installed, folder, "run", "recipe.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs/example"


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_parts_are_listed_with_their_package(installed: Path, tmp_path: Path) -> None:
    done = kedge(installed, tmp_path, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    assert {(part["kind"], part["name"]) for part in parts if part["package"] == "kedge-example"} == set(PARTS.items())
    assert {"grpo", "median"} <= {part["name"] for part in parts if part["kind"] == "algorithms"}


def test_the_stage_ran_and_what_it_made_was_read(run: Path) -> None:
    assert [row["prompt"] for row in records(run / "short/short.jsonl")] == ["Say a", "Say b", "Say c now"]
    events = {event["code"]: event["message"] for event in records(run / "short/events.jsonl")}
    assert events["short_prompts.kept"] == "3 of 4 prompts are kept"
    (prompts,) = (source for source in read_manifest(run / "median").inputs if source.name == "prompts")
    assert prompts.path.endswith("short.jsonl")


def test_the_method_decided_what_was_learnt(run: Path) -> None:
    """Its settings are in the manifest, and what the recipe leaves open follows its traits."""
    settings = read_manifest(run / "median").settings
    assert settings["method"] == {"kind": "median", "clip": 0.1}
    assert (settings["answers"], settings["kl"]["start"], settings["kl"]["where"]) == (5, 0.02, "loss")
    metrics = records(run / "median/metrics.jsonl")
    assert [row["group/rounds"] for row in metrics] == [1.0, 1.0]
    assert all(row["policy/grad_norm"] > 0 for row in metrics)
    assert all(0 < row["policy/above_median"] < 1 for row in metrics)  # a fact that only its loss has


def test_reward_and_generator_made_the_numbers(run: Path) -> None:
    """Answers have three tokens of one byte at most: brevity is 1 less a fortieth for each."""
    for row in records(run / "median/metrics.jsonl"):
        assert row["length/max"] <= 3
        assert 1 - 3 / 40 <= row["reward/mean"] <= 1


def test_the_tracker_has_what_the_run_wrote(run: Path) -> None:
    lines = (run / "median/trackers/numbers.txt").read_text().splitlines()
    for row in records(run / "median/metrics.jsonl"):
        assert f"{row['step']} reward/mean {row['reward/mean']}" in lines


def test_the_roles_were_built_by_the_plugin(run: Path) -> None:
    notes = [event["message"] for event in records(run / "median/events.jsonl") if event["code"] == "group.roles"]
    assert "all roles are in float32" in notes


@pytest.mark.usefixtures("on_path")
def test_every_part_keeps_its_contract(tmp_path: Path) -> None:
    """The package's own tests, one by one."""
    own = run_path(str(SOURCE / "tests/test_contracts.py"))
    contracts = [value for name, value in own.items() if name.startswith("Test")]
    assert len(contracts) == len(PARTS)
    for contract in contracts:
        for name in dir(contract):
            if name.startswith("test_"):
                test = getattr(contract(), name)
                folder = tmp_path / contract.__name__ / name
                folder.mkdir(parents=True)
                test(**dict.fromkeys(signature(test).parameters, folder))


@pytest.mark.parametrize("file", FILES)
def test_the_page_about_plugins_shows_the_files_as_they_are(file: str) -> None:
    assert f"\n{(SOURCE / file).read_text(encoding='utf-8')}```\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.usefixtures("on_path")
def test_a_mistake_in_a_part_from_elsewhere_is_reported_like_one_in_ours(tmp_path: Path) -> None:
    stage = {"kind": "group", "reward": {"kind": "exact"}, "prompts": "p.jsonl"}
    recipe = {"kedge": 1, "name": "wrong", "model": "tiny"}
    stages = {
        "a": {**stage, "method": {"kind": "median", "clp": 0.1}},
        "b": {**stage, "method": "medain"},
        "c": {**stage, "generator": {"kind": "capped", "tokens": 0}},
        "d": {**stage, "roles": "full_precison"},
        "e": {"kind": "short_prompts", "data": "p.jsonl", "max_word": 3},
    }
    (tmp_path / "wrong.yaml").write_text(json.dumps({**recipe, "stages": stages}))
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "wrong.yaml")
    for problem in (
        "stages.a.method.clp: not a setting here (did you mean 'clip'?)",
        "stages.b.method: there is no method 'medain' (did you mean 'median'?)",
        "stages.c.generator.tokens: must be at least 1, found 0",
        "stages.d.roles: must be 'full_precision', 'lora', 'separate' or 'trunk', found 'full_precison' "
        "(did you mean 'full_precision'?)",
        "stages.e.max_word: not a setting here (did you mean 'max_words'?)",
    ):
        assert problem in str(caught.value)
