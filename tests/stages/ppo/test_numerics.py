"""Numbers that are not finite, in the reward, in log-probs and in gradients: none of them reaches a weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.core.errors import NumericsError
from kedge.core.records import Rollouts
from kedge.models.roles.actor_critic import Critic, Policy, RoleSet
from kedge.models.training.train_step import TrainStep
from kedge.rewards.rollouts import FromText
from kedge.runs.folder import Run, status_of
from kedge.runs.state import load_state
from kedge.stages.rl import host as rl_host

RunPPO = Callable[..., Path]
Recipe = Callable[..., Path]
Kedge = Callable[..., int]
Records = Callable[[Path], list[dict[str, Any]]]

SOME = """
import math

def some(answers):
    scores = [len(set(one.text)) / 8 for one in answers]
    return [scores[0], math.nan, scores[2], -math.inf]
"""
WHILE_BROKEN = """
from pathlib import Path

def while_broken(answers):
    broken, begun = (Path(__file__).with_name(name) for name in ("broken", "begun"))
    is_broken = broken.exists() and begun.exists()
    begun.touch()
    return [float("nan") if is_broken else len(set(one.text)) / 8 for one in answers]
"""


def learnt(stage: Path, step: int) -> dict[str, Tensor]:
    """The weights of policy and critic in a checkpoint."""
    held = load_state(stage / f"checkpoints/step-{step:06d}")["roles"]
    policy, critic = held["policy"]["train_step"]["weights"], held["critic"]["weights"]
    return {f"policy.{name}": one for name, one in policy.items()} | {
        f"critic.{name}": one for name, one in critic.items()
    }


def changed(stage: Path, one: int, other: int) -> set[str]:
    """Which roles have other weights in two checkpoints."""
    before, after = learnt(stage, one), learnt(stage, other)
    assert all(tensor.isfinite().all() for tensor in (*before.values(), *after.values()))
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def refused(stage: Path, records: Records) -> list[tuple[int, str]]:
    events = [one for one in records(stage / "events.jsonl") if one["code"] == "step.not_finite"]
    assert all(one["level"] == "warning" for one in events)
    return [(one["step"], one["message"]) for one in events]


def test_rows_whose_score_is_no_number_are_left_out_and_counted(
    run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    source = {"kind": "function", "path": "rules.py:some"}
    stage = run_ppo(
        tmp_path, rules=SOME, reward=source, failures={"max_share": 1.0}, logging={"samples": 4}, iterations=3
    )
    found = records(stage / "metrics.jsonl")
    assert [one["reward/unscored"] for one in found] == [0.5] * 3
    assert all(abs(one["reward/mean"]) <= 1 for one in found)
    samples = [one for one in records(stage / "samples.jsonl") if one["step"] == 1]
    assert len(samples) == 2  # the rows that have a score
    assert found[0]["reward/mean"] == pytest.approx(sum(one["reward"] for one in samples) / 2, rel=1e-6)
    assert changed(stage, 2, 3) == {"policy", "critic"}
    told = [one["message"] for one in records(stage / "events.jsonl") if one["code"] == "reward.unscored"]
    assert told[-1].startswith("reward: 6 of 12 answers have no score so far:")
    assert "the function gave nan (3x)" in told[-1]
    assert "the function gave -inf (3x)" in told[-1]


def test_too_many_rows_without_a_score_stop_the_run(ppo_recipe: Recipe, kedge: Kedge, tmp_path: Path) -> None:
    source = {"kind": "function", "path": "rules.py:some"}
    failures = {"max_share": 0.5, "window": 8}
    recipe = ppo_recipe(tmp_path, rules=SOME, reward=source, failures=failures, iterations=4)
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 0
    recipe = ppo_recipe(
        tmp_path / "b", rules=SOME, reward=source, failures={**failures, "max_share": 0.4}, iterations=4
    )
    assert kedge("run", recipe, "--runs", tmp_path / "b/runs", "--no-check") == 1
    stage = tmp_path / "b/runs/short/ppo"
    assert status_of(stage) == "failed"
    (event,) = [one for one in Run.open(stage, for_writing=False).read_events() if one["code"] == "run.failed"]
    assert "reward 'reward' gave no score to 4 of its last 8 answers; allowed are 40% of 8" in event["message"]


def test_five_batches_in_a_row_stop_the_run_and_it_goes_on_once_the_cause_is_gone(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, tmp_path: Path
) -> None:
    source = {"kind": "function", "path": "rules.py:while_broken"}
    settings = {"reward": source, "iterations": 12, "failures": {"max_share": 1.0}}
    recipe = ppo_recipe(tmp_path, rules=WHILE_BROKEN, **settings)
    (tmp_path / "broken").touch()
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 1
    stage = tmp_path / "runs/short/ppo"
    run = Run.open(stage, for_writing=False)
    assert (status_of(stage), run.checkpoints.steps()[-1]) == ("failed", 6)
    assert [step for step, _ in refused(stage, records)] == [2, 3, 4, 5, 6]
    assert changed(stage, 1, 6) == set()
    last = run.read_events()[-1]
    assert last["message"].startswith("NumericsError: 5 iterations in a row were dropped; the last one: reward: none")
    # Nothing was mended: one more is enough.
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 1
    assert [step for step, _ in refused(stage, records)] == [2, 3, 4, 5, 6, 7]
    (tmp_path / "broken").unlink()
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 0
    assert [one["step"] for one in records(stage / "metrics.jsonl")] == [1, 8, 9, 10, 11, 12]
    assert changed(stage, 0, 12) == {"policy", "critic"}


def poisoned(real: Callable[[Any, Rollouts], Tensor], *, call: int, value: float) -> Callable[[Any, Rollouts], Tensor]:
    """The same answers, but the third row's last token is not a number in one of the calls."""
    calls = iter(range(1, 99))

    def answer(role: Any, rollouts: Rollouts) -> Tensor:
        found = real(role, rollouts).clone()
        if next(calls) == call:
            row = (2,) if found.ndim == 1 else (2, int(rollouts.response_mask_BT[2].nonzero()[-1]))
            found[row] = value
        return found

    return answer


@pytest.mark.parametrize(
    ("role", "verb", "value", "culprit"),
    [
        (FromText, "score", torch.inf, r"reward: 1 of 4 are not finite, first inf at row 2;"),
        (Policy, "logprobs", torch.nan, r"policy log-prob: 1 of \d+ are not finite, first nan at row 2, token \d+;"),
        (Critic, "values", -torch.inf, r"value: 1 of \d+ are not finite, first -inf at row 2, token \d+;"),
    ],
)
def test_a_number_of_a_role_that_is_not_finite_is_named(
    role: Any,
    verb: str,
    value: float,
    culprit: str,
    run_ppo: RunPPO,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(role, verb, poisoned(getattr(role, verb), call=2, value=value))
    stage = run_ppo(tmp_path, iterations=3)
    assert [one["step"] for one in records(stage / "metrics.jsonl")] == [1, 3]
    ((step, message),) = refused(stage, records)
    assert step == 2
    assert message.startswith("iteration 2: dropped: ")
    assert re.search(culprit, message)
    assert message.endswith("its batch is kept in bad-steps/step-000002")
    (kept,) = load_state(stage / "bad-steps/step-000002")["batches"]
    assert kept["tokens_BT"].shape == kept["behaviour_logp_BT"].shape
    assert kept["tokens_BT"].shape[0] == 4
    assert changed(stage, 1, 2) == set()
    assert changed(stage, 2, 3) == {"policy", "critic"}


def test_a_broken_weight_of_the_reference_is_named_and_stops_the_run(
    run_ppo: RunPPO, records: Records, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rl_host, "build_roles", poison_after(rl_host.build_roles, reference_weight))
    with pytest.raises(NumericsError, match="5 iterations in a row were dropped; the last one: reference log-prob"):
        run_ppo(tmp_path, iterations=9)
    stage = tmp_path / "runs/short/ppo"
    told = refused(stage, records)
    assert [step for step, _ in told] == [1, 2, 3, 4, 5]
    assert all("dropped: reference log-prob: " in message for _, message in told)
    assert changed(stage, 0, 5) == set()


def reference_weight(held: RoleSet) -> nn.Parameter:
    backbone: Any = getattr(held.reference, "_model").backbone  # noqa: B009
    return backbone.model.model.norm.weight


def poison_after(build: Callable[..., RoleSet], pick: Callable[[RoleSet], nn.Parameter]) -> Callable[..., RoleSet]:
    def held_and_poisoned(*arguments: Any) -> RoleSet:
        held = build(*arguments)
        with torch.no_grad():
            pick(held)[3] = torch.nan
        return held

    return held_and_poisoned


@pytest.mark.parametrize(("role", "moved"), [("policy", {"critic"}), ("critic", set[str]())])
def test_a_gradient_that_is_not_finite_is_named_and_changes_no_weight(
    role: str,
    moved: set[str],
    run_ppo: RunPPO,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The critic learns first in every minibatch: its step before the policy's bad one stays."""
    build_roles = rl_host.build_roles

    def build_hooked(*arguments: Any) -> RoleSet:
        held = build_roles(*arguments)
        train_step: TrainStep = getattr(held, role).train_step
        weight: nn.Parameter = dict(train_step.named)["model.layers.1.mlp.up_proj.weight"]
        weight.register_hook(lambda gradient: gradient * torch.nan if train_step.step == 3 else gradient)
        return held

    monkeypatch.setattr(rl_host, "build_roles", build_hooked)
    stage = run_ppo(tmp_path, iterations=3)
    ((step, message),) = refused(stage, records)
    assert step == 2
    assert f"the gradient of {role}'s model.layers.1.mlp.up_proj.weight is not finite" in message
    assert "the weights are unchanged" in message
    assert changed(stage, 1, 2) == moved
    assert changed(stage, 2, 3) == {"policy", "critic"}
    assert (stage / "bad-steps/step-000002/state.safetensors").is_file()
