"""Recipes of scripts: the same as files, followed by a callback, stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kedge
from kedge.core.errors import ConfigError
from kedge.recipe.wiring import connect
from kedge.testing.journals import records

PPO = Callable[..., kedge.PPO]

RULES = "def score(answer, weight=1.0):\n    return weight * len(answer.text) / 8\n"


def weights_of(run: kedge.Run) -> dict[str, torch.Tensor]:
    return load_file(run.stage("ppo").model / "model.safetensors")


@pytest.fixture
def values(rollouts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe as a YAML file holds it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("rules.py").write_text(RULES)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rollouts["prompts"]))
    top = {"kedge": 1, "name": "short", **{key: rollouts[key] for key in ("seed", "device", "model")}}
    reward = {"kind": "function", "path": "rules.py:score", "options": {"weight": 2.0}}
    own = {key: value for key, value in rollouts.items() if key not in top}
    stage = {**own, "kind": "ppo", "minibatches": 2, "prompts": "prompts.jsonl", "reward": reward}
    return {**top, "stages": {"ppo": stage}}


def test_a_dict_is_the_same_recipe_as_a_file(values: dict[str, Any]) -> None:
    Path("short.yaml").write_text(json.dumps(values))
    sets = {"stages.ppo.kl": {"start": 0.2}, "seed": 8}
    from_file = kedge.Recipe.load("short.yaml", sets=sets)
    from_dict = kedge.Recipe(values, sets=["stages.ppo.kl.start=0.2", "seed=8"])
    assert from_file.resolved() == from_dict.resolved()
    assert (from_dict.name, from_dict.stages, from_dict.resolved()["seed"]) == ("short", ("ppo",), 8)
    runs = [from_file.run(say=None), from_dict.run("elsewhere", say=None)]
    assert runs[0].folder == Path("runs/short")
    first, second = (records(run.folder / "ppo/metrics.jsonl") for run in runs)
    assert first == second
    assert len(first) == 2


def test_an_exam_in_a_dict_names_its_models_by_place(tmp_path: Path) -> None:
    stage = {"kind": "exam", "models": ["tiny", tmp_path / "rm"], "exams": ["knowledge"]}
    recipe = kedge.Recipe({"kedge": 1, "name": "asked", "model": "tiny", "stages": {"exam": stage}})
    assert recipe.resolved()["stages"]["exam"]["models"] == ["tiny", str(tmp_path / "rm")]


def test_the_problems_of_a_dict_are_listed_by_path(values: dict[str, Any]) -> None:
    values["stages"]["ppo"] |= {"iterations": 0, "bacth": 3}
    values["stages"]["other"] = {"kind": "pop"}
    with pytest.raises(ConfigError) as caught:
        kedge.Recipe.from_dict(values, sets={"seed": -1})
    assert str(caught.value).splitlines() == [
        "recipe: 4 problem(s)",
        "  --set seed=-1: seed: must be at least 0, found -1",
        "  stages.ppo.iterations: must be at least 1, found 0",
        "  stages.ppo.bacth: not a setting here (did you mean 'batch'?)",
        "  stages.other.kind: no stage of kind 'pop' (did you mean 'ppo'?); installed: best_of_n, data, drift, "
        "evaluate, exam, gate, group, label, ppo, preference, revise, reward, sft, tasks",
    ]


def test_a_dict_may_extend_a_file_and_hold_functions_and_rows(values: dict[str, Any]) -> None:
    values["stages"]["ppo"]["reward"] = "judge"
    Path("base.yaml").write_text(json.dumps(values))
    stage = {"kind": "ppo", "reward": lambda answer: 0.0, "prompts": ["one", "two"]}
    recipe = kedge.Recipe({"extends": "base.yaml", "name": "other", "stages": {"ppo": stage}})
    settings = recipe.resolved()["stages"]["ppo"]
    assert (recipe.name, settings["iterations"], settings["prompts"]) == ("other", 2, "inputs/ppo.prompts.jsonl")
    assert settings["reward"]["kind"] == "callable"
    assert not [finding for finding in recipe.check() if finding.level == "fatal"]
    Path("base.yaml").write_text(json.dumps(values).replace('"batch": 4', '"batch": 0'))
    with pytest.raises(ConfigError, match=r"\n  base.yaml line 1: stages.ppo.batch: must be at least 1, found 0"):
        kedge.Recipe({"extends": "base.yaml"})


def test_paths_of_a_dict_start_here_and_those_of_the_file_that_it_extends_there(values: dict[str, Any]) -> None:
    Path("below").mkdir()
    Path("below/base.yaml").write_text(json.dumps(values))
    Path("prompts.jsonl").rename("below/prompts.jsonl")
    Path("others.jsonl").write_text('{"prompt": "Say nothing"}\n')
    recipe = {"extends": "below/base.yaml", "stages": {"two": {**values["stages"]["ppo"], "prompts": "others.jsonl"}}}
    links = connect(kedge.Recipe(recipe)._recipe).links
    sources = {name: [link.source() for link in links[name] if link.field == "prompts"] for name in links}
    assert sources == {"ppo": ["below/prompts.jsonl"], "two": ["./others.jsonl"]}


def test_a_file_cannot_name_a_function_of_a_script(values: dict[str, Any]) -> None:
    values["stages"]["ppo"]["reward"] = {"kind": "callable", "name": "rules.score"}
    Path("short.yaml").write_text(json.dumps(values, indent=1))
    with pytest.raises(ConfigError, match=r"line \d+: stages\.ppo\.reward: `callable` is for scripts.*kind: function"):
        kedge.Recipe.load("short.yaml")


def test_a_callback_sees_every_step_as_it_is_written(ppo: PPO, runs: Path) -> None:
    seen: list[tuple[int, dict[str, float], str]] = []

    def on_step(step: int, metrics: dict[str, float], stage: str) -> None:
        seen.append((step, metrics, stage))

    run = ppo().run(runs / "followed", on_step=on_step, say=None)
    written = [{key: value for key, value in each.items() if key != "at"} for each in run.metrics()]
    assert [{"step": step, "stage": stage, **metrics} for step, metrics, stage in seen] == written


def test_a_run_that_a_callback_stopped_goes_on_to_the_same_end(ppo: PPO, runs: Path, done: kedge.Run) -> None:
    said: list[str] = []
    short = ppo(iterations=3)
    run = short.run(runs / "done", on_step=lambda step, metrics: step == 2, say=said.append)
    assert (run.status, len(list(run.metrics()))) == ("interrupted", 2)
    assert said[0] == f"run folder: {runs / 'done'}"
    run = short.run(runs / "done", resume=True, say=None)
    assert run.status == "done"
    assert records(run.folder / "ppo/metrics.jsonl") == records(done.folder / "ppo/metrics.jsonl")
    weights, expected = weights_of(run), weights_of(done)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_stop_at_the_end_of_a_stage_keeps_the_next_from_beginning(values: dict[str, Any]) -> None:
    first = values["stages"]["ppo"] | {"iterations": 1}
    values["stages"] = {"first": first, "second": {**first, "from": "first"}}
    recipe = kedge.Recipe(values)
    run = recipe.run(on_step=lambda step, metrics: True, say=None)
    assert run.status == "interrupted"
    assert {name: stage.status for name, stage in run.stages.items()} == {"first": "done"}
    assert recipe.run(resume=True, say=None).status == "done"


def test_a_run_is_resumed_with_the_same_function_and_rows_only(ppo: PPO, runs: Path) -> None:
    def score(answer: kedge.Answer) -> float:
        return 1.0

    def make(least: float) -> Callable[[kedge.Answer], float]:
        return lambda answer: least

    ppo(reward=make(0.1), gold=score).run(runs / "one", on_step=lambda step, metrics: True, say=None)
    with pytest.raises(ConfigError, match=r"stages\.ppo\.reward\.source: was '\w+', is '\w+'"):
        ppo(reward=make(0.2), gold=score).run(runs / "one", resume=True, say=None)
    before = (runs / "one/inputs/prompts.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"was started with other rows than those given now as `prompts`"):
        ppo(reward=make(0.1), gold=score, prompts=["other"]).run(runs / "one", resume=True, say=None)
    assert (runs / "one/inputs/prompts.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"there is a run of this name already .*in Python: resume=True"):
        ppo(reward=make(0.1), gold=score).run(runs / "one", say=None)
    assert ppo(reward=make(0.1), gold=score).run(runs / "one", resume=True, say=None).status == "done"


def test_what_is_interrupted_by_hand_is_raised(ppo: PPO, runs: Path) -> None:
    def by_hand(answer: kedge.Answer) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ppo(reward=by_hand).run(runs / "hand", say=None)
    assert kedge.Run(runs / "hand").status == "interrupted"
