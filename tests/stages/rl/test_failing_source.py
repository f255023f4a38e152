"""A reward source that is off: its reason is said at once, the stage fails with everything saved, and can be mended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.doctor import examine
from kedge.core.errors import RewardError
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import Run, status_of

Kedge = Callable[..., int]

RULES = """
from pathlib import Path

OFF = Path(__file__).with_name("off")

def one(answer):
    if OFF.exists():
        raise ConnectionError("the judge at https://me:pw@judge.example/?key=s3cret is off")
    return sum(letter < "\\x80" for letter in answer.text) / 8

def ends(answers):
    raise SystemExit(0)

def needs_more(answer, second):
    return 0.0
"""
ONE = {"kind": "function", "path": "rules.py:one"}
FINE = {"kind": "regex", "pattern": "[a-m]"}
SAMPLED: dict[str, Any] = {"max_prompt_tokens": 40, "sampling": {"max_new_tokens": 6}}
LEARN = {"lr": 1e-2}
RL: dict[str, Any] = {
    **SAMPLED,
    "roles": "separate",
    "memory": {"dtype": "float32"},
    "iterations": 2,
    "batch": 4,
    "minibatches": 1,
    "micro_batch": 4,
    "checkpoints": {"every": 1},
}
STAGES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "ppo", **RL},
    "group": {"kind": "group", **RL, "answers": 2},
    "best_of_n": {
        "kind": "best_of_n",
        **SAMPLED,
        "method": {"kind": "rejection", "finished": False},
        "n": 2,
        "batch": 4,
        "optimiser": LEARN,
    },
    "preference": {"kind": "preference", "batch": 4, "max_length": 64, "optimiser": LEARN, "heldout_share": 0.2},
    "evaluate": {"kind": "evaluate", "answers": 1, "max_new_tokens": 5, "dtype": "float32"},
}
REASON = "ConnectionError: the judge at https://***@judge.example/?key=*** is off"


def write(place: Path, home: Path, kind: str, **sources: Any) -> Path:
    (place / "rules.py").write_text(RULES)
    prompts = str(home / "prompts.jsonl")
    asked: dict[str, Any] = {"prompts": prompts, **sources}
    if kind == "preference":
        asked = {"online": {"rounds": 1, "answers": 3, "finished": False, **SAMPLED, **asked}}
    if kind == "evaluate":
        asked |= {"models": [str(home / "tiny")]}
    recipe = {"kedge": 1, "name": "off", "seed": 5, "model": str(home / "tiny"), "device": "cpu"}
    file = place / "recipe.yaml"
    file.write_text(json.dumps({**recipe, "stages": {"stage": {**STAGES[kind], **asked}}}))
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("field", ["reward", pytest.param("gold", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        "ppo",
        pytest.param("group", marks=pytest.mark.slow),
        "best_of_n",
        pytest.param("preference", marks=pytest.mark.slow),
        "evaluate",
    ],
)
def test_a_source_that_is_off_fails_the_stage(kind: str, field: str, ppo_home: Path, tmp_path: Path) -> None:
    file = write(tmp_path, ppo_home, kind, **{"reward": FINE, field: ONE})
    (tmp_path / "off").touch()
    lines: list[str] = []
    with pytest.raises(RewardError, match=f"the reward source failed: '[a-z.]*{field}' gave no score to any of"):
        run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=lines.append)
    stage = tmp_path / "runs/off/stage"
    run = Run.open(stage, for_writing=False)
    assert status_of(stage) == "failed"
    events = run.read_events()
    (first,) = [event for event in events if event["code"] == "reward.first_unscored"]
    assert first["message"].endswith(f"{field}: answer 1 is the first without a score: {REASON}")
    assert f"  {first['message']}" in lines
    assert REASON in events[-1]["message"]
    diagnosis = examine(stage)[0].diagnosis
    assert (diagnosis.causes[0].code, diagnosis.causes[0].title) == ("reward_source", "the reward source failed")
    assert any(REASON in line for line in diagnosis.causes[0].evidence)
    # Nothing that was paid for is lost: the mended run goes on and ends.
    (tmp_path / "off").unlink()
    run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=True, say=lines.append)
    assert status_of(stage) == "done"
    everything = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*.json*") if path.suffix != ".chain")
    assert "s3cret" not in everything


def test_ppo_learns_from_every_iteration_of_a_mended_run(ppo_home: Path, tmp_path: Path) -> None:
    file = write(tmp_path, ppo_home, "ppo", reward=ONE)
    (tmp_path / "off").touch()
    with pytest.raises(RewardError):
        run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=print)
    stage = tmp_path / "runs/off/stage"
    assert Run.open(stage, for_writing=False).checkpoints.steps() == [0]
    (tmp_path / "off").unlink()
    run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=True, say=print)
    assert [line["step"] for line in Run.open(stage, for_writing=False).read_metrics()] == [1, 2]


@pytest.mark.slow
def test_a_gold_source_that_fails_leaves_a_checkpoint_of_whole_iterations(ppo_home: Path, tmp_path: Path) -> None:
    """The policy has learnt from the iteration when gold is asked: it is saved as of the step after it."""
    file = write(tmp_path, ppo_home, "ppo", reward=FINE, gold=ONE)
    (tmp_path / "off").touch()
    with pytest.raises(RewardError):
        run_recipe(load_recipe(file), tmp_path / "runs", is_resumed=False, say=print)
    run = Run.open(tmp_path / "runs/off/stage", for_writing=False)
    assert run.checkpoints.steps() == [0, 1]
    assert [line["step"] for line in run.read_metrics()] == [1]


def test_a_reward_that_ends_the_program_does_not_end_it_well(ppo_home: Path, tmp_path: Path, kedge: Kedge) -> None:
    file = write(tmp_path, ppo_home, "ppo", reward={"kind": "function", "path": "rules.py:ends"})
    assert kedge("run", file, "--runs", tmp_path / "runs", "--no-check") == 1
    assert "SystemExit: 0" in Run.open(tmp_path / "runs/off/stage", for_writing=False).read_events()[-1]["message"]


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (None, 1), (5, 5)])
def test_other_code_that_ends_the_program_does_not_end_it_well_either(
    code: int | None, expected: int, ppo_home: Path, tmp_path: Path, kedge: Kedge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("kedge.stages.evaluate.run.fitting_prompts", leave)
    file = write(tmp_path, ppo_home, "evaluate", reward=FINE)
    assert kedge("run", file, "--runs", tmp_path / "runs", "--no-check") == expected
    run = Run.open(tmp_path / "runs/off/stage", for_writing=False)
    assert run.status == "failed"
    assert f"ended the program (SystemExit: {code})" in run.read_events()[-1]["message"]


def test_evaluate_finds_a_parameter_that_nothing_fills_before_it_samples(
    ppo_home: Path, tmp_path: Path, kedge: Kedge, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kedge.stages.evaluate.run.candidate_answers", lambda *_, **__: pytest.fail("sampled"))
    mix = {"kind": "mix", "parts": {"fine": FINE, "bad": {"kind": "function", "path": "rules.py:needs_more"}}}
    for sources in ({"reward": mix}, {"reward": FINE, "gold": {"kind": "function", "path": "rules.py:needs_more"}}):
        file = write(tmp_path, ppo_home, "evaluate", **sources)
        assert kedge("run", file, "--runs", tmp_path / f"runs-{len(sources)}", "--no-check") == 2
        assert "rules.py:needs_more: nothing fills its parameter `second`" in capsys.readouterr().err
