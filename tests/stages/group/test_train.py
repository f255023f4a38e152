"""The stage `group` from recipe to model: every method, resume, cuts, the KL contract, and published defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.testing import assert_close

from kedge.core.errors import ContractStop
from kedge.core.plugin_sections import kind_of
from kedge.core.plugins import names
from kedge.models.training.train_step import TrainStep
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rollout.local import LocalGenerator
from kedge.runs.folder import Run, status_of
from kedge.runs.state import load_state
from kedge.stages.group.settings import STAGE, GroupSettings, check, explain, find_method

RunGroup = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
Weights = Callable[[Path], dict[str, torch.Tensor]]

RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8

def mostly_plain(answer):
    return float(plain(answer) > 0.7)
"""
SHORT: dict[str, Any] = {
    "kind": "group",
    "reward": {"kind": "function", "path": "rules.py:plain"},
    "roles": "separate",
    "memory": {"dtype": "float32", "lora": {"rank": 2}},
    "iterations": 2,
    "batch": 3,
    "answers": 4,
    "minibatches": 1,
    "micro_batch": 6,
    "max_prompt_tokens": 40,
    "sampling": {"max_new_tokens": 8},
    "actor": {"lr": 1e-2, "schedule": "constant", "warmup": 0.0, "eps": 1e-5},
    "logging": {"every": 1, "samples": 1},
    "checkpoints": {"every": 1, "keep": 20},
}


@pytest.fixture(scope="module")
def run_group(ppo_home: Path) -> RunGroup:
    """A run of one such stage below a folder; settings go over those of `SHORT`. Returns the folder of the stage."""

    def run(place: Path, *, resumed: bool = False, **settings: Any) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        (place / "rules.py").write_text(RULES)
        stage = {**SHORT, "prompts": str(ppo_home / "prompts.jsonl"), **settings}
        recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(ppo_home / "tiny"), "device": "cpu"}
        file = place / "recipe.yaml"
        file.write_text(json.dumps({**recipe, "stages": {"group": stage}}))
        return run_recipe(load_recipe(file), place / "runs", is_resumed=resumed, say=print) / "group"

    return run


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[] if one == "grpo" else pytest.mark.slow) for one in names("algorithms")]
)
def test_every_method_is_one_word_and_learns(
    method: str, run_group: RunGroup, records: Records, weights: Weights, ppo_home: Path, tmp_path: Path
) -> None:
    stage = run_group(tmp_path, method=method)
    first, second = records(stage / "metrics.jsonl")
    assert first["kl/mean"] == pytest.approx(0.0, abs=1e-5)  # the policy is the reference still
    assert first["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl/mean"] != first["kl/mean"]
    assert second["policy/mismatch"] < 1e-4
    assert 0 < first["reward/mean"] < 1
    assert not [name for name in first if name.startswith("value/")]
    before = load_file(ppo_home / "tiny/model.safetensors")
    after = weights(stage)
    assert any(not torch.equal(one, after[name]) for name, one in before.items())
    assert status_of(stage) == "done"


STATES: dict[str, dict[str, Any]] = {
    # a group is left out every now and then, so that batches do not begin where their number says
    "dapo": {"reward": {"kind": "function", "path": "rules.py:mostly_plain"}, "answers": 2, "roles": "trunk"},
    "remax": {"answers": 2, "roles": "lora", "kl": {"start": 0.1, "target": 0.5, "horizon": 20}},
    "reinforce": {"scores": {"normalise": "standard"}, "ema": 0.9},
}


class Fallen(Exception):
    pass


@pytest.mark.parametrize(
    "method", ["dapo", *(pytest.param(one, marks=pytest.mark.slow) for one in ("remax", "reinforce"))]
)
def test_a_run_that_fell_is_taken_up_to_the_last_bit(
    method: str, run_group: RunGroup, records: Records, tmp_path: Path
) -> None:
    settings = {"method": method, "iterations": 4, "checkpoints": {"every": 2}, **STATES[method]}
    whole = run_group(tmp_path / "whole", **settings)
    real = LocalGenerator.generate

    def falls(self: LocalGenerator, *asked: Any) -> Any:
        metrics = tmp_path / "cut/runs/short/group/metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) == 3:
            raise Fallen
        return real(self, *asked)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalGenerator, "generate", falls)
        with pytest.raises(Fallen):
            run_group(tmp_path / "cut", **settings)
    cut = tmp_path / "cut/runs/short/group"
    assert Run.open(cut, for_writing=False).checkpoints.steps()[-1] == 2
    run_group(tmp_path / "cut", resumed=True, **settings)
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(cut / journal) == records(whole / journal)
    assert len(records(whole / "metrics.jsonl")) == 4
    model = "model/model.safetensors"
    assert (cut / model).read_bytes() == (whole / model).read_bytes()
    if method == "dapo":  # so that the comparison says something about where prompts are
        assert load_state(whole / "checkpoints/step-000002")["stateful"]["sampler"]["position"] != 2 * 3


def test_how_a_step_is_cut_changes_nothing(run_group: RunGroup, weights: Weights, tmp_path: Path) -> None:
    """In SGD's place there is Adam, which turns rounding into steps: one step, and gradients by their norm."""
    found = [run_group(tmp_path / str(rows), micro_batch=rows, iterations=1) for rows in (1, 5, 12)]
    lines = [json.loads((stage / "metrics.jsonl").read_text()) for stage in found]
    for name in ("policy/loss", "policy/grad_norm", "entropy/mean", "kl/mean", "reward/mean"):
        values = [line[name] for line in lines]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-6), name
    assert lines[0]["policy/grad_norm"] > 0.01


def test_a_broken_budget_stops_the_run_with_the_last_good_policy(
    run_group: RunGroup, records: Records, weights: Weights, tmp_path: Path
) -> None:
    method = {"method": "dr_grpo", "iterations": 12, "kl": {"limit": 0.05}}
    with pytest.raises(
        ContractStop, match=r"over the limit of 0\.05\. The policy of step \d+, the last one found within"
    ):
        run_group(tmp_path, **method)
    stage = tmp_path / "runs/short/group"
    events = [one["code"] for one in records(stage / "events.jsonl")]
    assert "kl.limit" in events
    good = Run.open(stage, for_writing=False).checkpoints.pins()["good"]
    state = load_state(stage / f"checkpoints/step-{good:06d}")["roles"]["policy"]["train_step"]["weights"]
    for name, one in weights(stage).items():
        assert_close(one, state[name])


def settings_of(**given: Any) -> GroupSettings:
    return GroupSettings.model_validate({"kind": "group", "reward": "reward", "prompts": "p.jsonl", **given})


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grpo", (8, 1, None, "loss", "k3", 0.04, None)),
        ("dr_grpo", (8, 1, None, "loss", "k3", 0.0, None)),
        ("rloo", (4, 1, None, "reward", "k1", 0.05, None)),
        ("reinforce", (1, 1, None, "reward", "k1", 0.05, None)),
        ("reinforce++", (1, 1, None, "reward", "k1", 0.05, None)),
        ("remax", (1, 1, None, "reward", "k1", 0.05, None)),
        ("gspo", (8, 4, None, "loss", "k3", 0.0, None)),
        ("cispo", (8, 4, None, "loss", "k3", 0.0, None)),
        ("dapo", (8, 4, 10, "loss", "k3", 0.0, 100)),
    ],
)
def test_what_a_recipe_does_not_say_follows_the_method(method: str, expected: tuple[Any, ...]) -> None:
    """An answer has 500 tokens at most: the last fifth of them costs under DAPO."""
    for given in (method, {"kind": method}):
        one = settings_of(method=given, sampling={"max_new_tokens": 500})
        kl, buffer = one.kl, one.scores.overlong_buffer
        found = (one.answers, one.minibatches, one.max_rounds, kl.where, kl.kind, kl.start, buffer)
        assert found == expected
        dumped = one.model_dump(mode="json", by_alias=True)
        assert GroupSettings.model_validate(dumped) == one
    assert kind_of(settings_of().method) == "grpo"


def test_a_method_that_clips_by_design_raises_no_alarm_for_it() -> None:
    assert settings_of(method="gspo").detectors.policy.clips_often == 0.8
    given = {"policy": {"clips_often": 0.5, "large_steps": None}, "kl": {"near_zero": None}}
    own = settings_of(method="gspo", detectors=given).detectors
    assert (own.policy.clips_often, own.policy.large_steps, own.kl.near_zero) == (0.5, None, None)
    part = settings_of(method="gspo", detectors={"policy": {"large_steps": None}}).detectors
    assert (part.policy.clips_often, part.policy.large_steps) == (0.8, None)
    usual = settings_of(method="grpo").detectors.policy.clips_often
    assert usual is not None
    assert usual < 0.5


def test_what_it_says_goes_over_that() -> None:
    one = settings_of(
        method="dapo", answers=3, max_rounds=None, kl={"start": 0.1, "limit": 5.0}, scores={"overlong_buffer": None}
    )
    assert (one.answers, one.max_rounds, one.scores.overlong_buffer) == (3, None, None)
    assert (one.kl.start, one.kl.where, one.kl.limit) == (0.1, "loss", 5.0)


@pytest.mark.parametrize(
    ("settings", "code", "level", "where"),
    [
        ({"method": "grpo", "answers": 1}, "group.answers", "fatal", "answers"),
        ({"method": "reinforce++", "max_rounds": 3}, "group.answers", "fatal", "answers"),
        ({"method": "rloo", "minibatches": 2}, "group.off_policy", "warning", "minibatches"),
        ({"method": "remax", "epochs": 2}, "group.off_policy", "warning", "epochs"),
        ({"method": "dapo"}, "group.no_anchor", "warning", "kl"),
        ({"minibatches": 1000}, "group.minibatches", "fatal", "minibatches"),
        ({"kl": {"start": 0.0, "target": 6.0}}, "group.kl_start", "fatal", "kl.start"),
        (
            {"scores": {"overlong_buffer": 20}, "sampling": {"max_new_tokens": 10}},
            "group.overlong",
            "fatal",
            "scores.overlong_buffer",
        ),
    ],
)
def test_trouble_is_found_before_the_run(settings: dict[str, Any], code: str, level: str, where: str) -> None:
    found = [one for one in check(settings_of(**settings)) if one.code == code]
    assert [(one.level, one.where) for one in found] == [(level, where)]


def test_methods_as_published_have_no_trouble_but_a_missing_anchor() -> None:
    for name in names("algorithms"):
        codes = {one.code for one in check(settings_of(method=name))}
        assert codes <= {"group.no_anchor"}, name


def test_the_arithmetic_is_told() -> None:
    lines = explain(settings_of(method="dapo", batch=16, iterations=10))
    assert lines[0].startswith("each iteration: 16 prompts × 8 answers = 128 responses; 1 epoch × 4 minibatches")
    assert lines[1] == "10 iterations: 1,280 responses in all"
    assert "up to 10 batches are answered until one is full" in lines[2]
    assert "the likeliest, is the baseline" in explain(settings_of(method="remax"))[-1]
    assert STAGE.window(settings_of(max_prompt_tokens=77)) == 77


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("drgrpo", r"there is no method 'drgrpo' \(did you mean 'dr_grpo'\?\); methods: cispo, dapo, dr_grpo, grpo"),
        ({"kind": "drgrpo"}, r"there is no method 'drgrpo' \(did you mean 'dr_grpo'\?\)"),
        (
            {"clip": 0.1},
            r"a method with settings says which one it is, such as \{kind: grpo, clip: 0.1\}; found no kind",
        ),
        (None, "must be the name of a method, or a mapping with its settings, found None"),
        ({"kind": "rloo", "clip": 0.1}, "Extra inputs are not permitted"),
        ({"kind": "grpo", "clip": 1.5}, "less than 1"),
    ],
)
def test_a_wrong_method_is_reported(method: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        settings_of(method=method)
    assert [problem["loc"][0] for problem in caught.value.errors()] == ["method"]


def test_a_method_can_be_given_as_its_settings_object() -> None:
    settings = find_method("dapo").settings(clip=0.1)
    given = settings_of(method=settings)
    assert given.method is settings
    assert given == settings_of(method={"kind": "dapo", "clip": 0.1})
    assert given.config().method_settings is settings
    assert given.config().method is find_method("dapo")


def test_a_setting_of_ppo_is_refused() -> None:
    with pytest.raises(ValidationError, match="critic_from_reward"):
        settings_of(memory={"critic_from_reward": True})


def test_every_setting_of_the_loop_reaches_it() -> None:
    config = settings_of(
        method="rloo",
        epochs=3,
        minibatches=2,
        batch=8,
        loss={"entropy": 0.01, "stop_at_kl": 0.4},
        sampling={"max_new_tokens": 77},
        kl={"start": 0.2},
        scores={"clip": 4.0},
    ).config()
    assert (config.epochs, config.minibatches, config.max_new_tokens) == (3, 2, 77)
    assert (config.entropy, config.stop_at_kl, config.kl.start, config.scores.clip) == (0.01, 0.4, 0.2, 4.0)
    assert config.method is find_method("rloo")


@pytest.mark.parametrize("method", ["grpo", pytest.param("remax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sampled_ahead_answers_have_their_age_and_a_fallen_run_is_taken_up_to_the_last_bit(
    method: str, lag: int, run_group: RunGroup, records: Records, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "method": method,
        "generator": {"kind": "local", "lag": lag},
        "iterations": 5,
        "max_rounds": 1,
        "checkpoints": {"every": 2},
    }
    whole = run_group(tmp_path / "whole", **settings)
    rows = records(whole / "metrics.jsonl")
    assert [row["age/mean"] for row in rows] == [min(step, lag) for step in range(5)]
    assert all("correct/weight" in row for row in rows)
    with pytest.MonkeyPatch.context() as patched:
        learn, calls = TrainStep.learn, iter(range(1, 99))

        def falling(*arguments: Any) -> Any:
            if next(calls) == 4:
                raise Fallen
            return learn(*arguments)

        patched.setattr(TrainStep, "learn", falling)
        with pytest.raises(Fallen):
            run_group(tmp_path, **settings)
    stage = run_group(tmp_path, resumed=True, **settings)
    assert records(stage / "metrics.jsonl") == rows
    model = "model/model.safetensors"
    assert (stage / model).read_bytes() == (whole / model).read_bytes()


def test_rounds_that_depend_on_scores_are_refused_under_a_lag() -> None:
    given = {"kind": "group", "reward": "judge", "prompts": "prompts.jsonl", "generator": {"kind": "local", "lag": 1}}

    def codes(**settings: Any) -> list[str]:
        return [finding.code for finding in check(GroupSettings.model_validate({**given, **settings}))]

    assert "group.lag_rounds" in codes(method="dapo")
    assert "group.lag_rounds" not in codes(method="dapo", max_rounds=None)
    assert "group.lag_rounds" not in codes(method="dapo", max_rounds=1)
    assert "group.uncorrected_lag" in codes(loss={"correct": None})
    assert "versions old" in explain(GroupSettings.model_validate(given))[-1]


def test_the_last_policy_is_measured_with_its_own_weights(
    run_group: RunGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions, load = list[int](), LocalGenerator.load_weights

    def load_and_note(generator: LocalGenerator, weights: Any, version: int) -> None:
        versions.append(version)
        load(generator, weights, version)

    monkeypatch.setattr(LocalGenerator, "load_weights", load_and_note)
    run_group(tmp_path, method="grpo", kl={"limit": 1000.0})
    assert versions == [0, 1, 2]
