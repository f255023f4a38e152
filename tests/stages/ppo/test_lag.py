"""Answers that are sampled ahead of the policy: their age, their weights, and exact resume with some under way."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kedge.core.errors import ContractStop
from kedge.core.records import Prompts, Rollouts
from kedge.models.training.train_step import TrainStep
from kedge.rollout.local import LocalGenerator
from kedge.runs.folder import status_of
from kedge.runs.state import load_state
from kedge.stages.ppo.settings import PPOSettings, check, explain
from kedge.trainers.correction import AllDropped

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]


def lagging(lag: int, **settings: Any) -> dict[str, Any]:
    return {"generator": {"kind": "local", "lag": lag}, "iterations": 4, "checkpoints": {"every": 2}, **settings}


@pytest.fixture(scope="module")
def whole(run_ppo: RunPPO, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The stage folder of a run with a lag that nothing interrupted, made once."""
    folders: dict[int, Path] = {}

    def run(lag: int) -> Path:
        if lag not in folders:
            folders[lag] = run_ppo(tmp_path_factory.mktemp("lag"), **lagging(lag))
        return folders[lag]

    return run


@pytest.mark.parametrize(("lag", "ages"), [(1, [0, 1, 1, 1]), (2, [0, 1, 2, 2])])
def test_answers_are_as_old_as_the_lag_allows_and_are_corrected(
    lag: int, ages: list[int], whole: Callable[[int], Path], records: Records
) -> None:
    rows = records(whole(lag) / "metrics.jsonl")
    assert [row["age/mean"] for row in rows] == ages
    first, *later = rows
    assert first["policy/mismatch"] < 1e-4
    assert first["correct/weight"] == pytest.approx(1.0, abs=1e-4)
    for row in later:
        assert "policy/mismatch" not in row
        assert row["policy/drift"] > 1e-3
        assert row["correct/weight"] != pytest.approx(1.0, abs=1e-4)
        assert row["correct/dropped"] == 0.0
        assert row["policy/approx_kl_first"] == pytest.approx(0.0, abs=1e-6)  # old log-probs are the trainer's


def test_without_a_lag_nothing_is_said_of_ages_and_nothing_is_corrected(
    run_ppo: RunPPO, records: Records, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    (on_policy,) = records(run_ppo(tmp_path, iterations=1) / "metrics.jsonl")
    assert not [name for name in on_policy if name.startswith(("age/", "correct/")) or name == "policy/drift"]
    ahead = records(whole(1) / "metrics.jsonl")[0]
    for name in ("reward/mean", "length/mean", "kl/mean", "value/loss"):  # the first batch is the same one
        assert ahead[name] == on_policy[name], name


class Fallen(Exception):
    pass


def fall() -> None:
    raise Fallen


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def falls(real: Callable[..., Any], *, call: int, action: Callable[[], None]) -> Callable[..., Any]:
    calls = iter(range(1, 999))

    def function(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == call:
            action()
        return real(*arguments, **settings)

    return function


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name", "call", "action"),
    [
        (TrainStep, "learn", 14, fall),  # 2 steps of two roles an iteration: in the fourth, from step 2 on
        (TrainStep, "learn", 9, interrupt),  # Ctrl-C in the third, which is finished and saved
        (LocalGenerator, "generate", 4, fall),
    ],
)
def test_resumed_with_answers_under_way_it_is_the_same_run(
    lag: int,
    owner: type,
    name: str,
    call: int,
    action: Callable[[], None],
    whole: Callable[[int], Path],
    run_ppo: RunPPO,
    records: Records,
    tmp_path: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, falls(getattr(owner, name), call=call, action=action))
        with pytest.raises((Fallen, KeyboardInterrupt)):
            run_ppo(tmp_path, **lagging(lag))
    run_ppo(tmp_path, resumed=True, **lagging(lag))
    found, expected = tmp_path / "runs/short/ppo", whole(lag)
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(found / journal) == records(expected / journal)
    model = "model/model.safetensors"
    assert (found / model).read_bytes() == (expected / model).read_bytes()
    assert status_of(found) == "done"


@pytest.mark.parametrize("lag", [1, 2])
def test_a_checkpoint_holds_what_is_under_way(lag: int, whole: Callable[[int], Path]) -> None:
    checkpoints = whole(lag) / "checkpoints"
    under_way = load_state(checkpoints / "step-000002")["under_way"]
    assert [batch["number"] for batch in under_way] == list(range(2, min(2 + lag, 4)))
    assert [batch["rollouts"]["version"] for batch in under_way] == list(range(2 - lag, 2))
    assert load_state(checkpoints / "step-000004")["under_way"] == []
    assert not [file for file in checkpoints.rglob("*") if file.suffix in (".pt", ".pkl", ".bin")]


def test_a_batch_of_which_all_answers_are_dropped_is_an_event_and_no_step(
    run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    """Step 1 learns, and the batch of step 2, sampled before, is far from the policy now; that of step 3 is of it."""
    settings = lagging(1, loss={"correct": {"cap": 2.0, "per": "sequence", "drop": [0.999, 1.001]}})
    stage = run_ppo(tmp_path, **settings | {"checkpoints": {"every": 1}})
    rows = records(stage / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 3]
    assert [row["age/mean"] for row in rows] == [0, 1]
    dropped = [event for event in records(stage / "events.jsonl") if event["code"] == "step.all_dropped"]
    assert [event["step"] for event in dropped] == [2, 4]
    assert dropped[0]["message"].startswith(
        "iteration 2: skipped: all 4 answers were sampled too far from the policy: their mean ratios of probabilities "
    )
    states = {step: load_state(stage / f"checkpoints/step-00000{step}")["roles"] for step in (1, 2, 3)}
    weights = {step: state["policy"]["train_step"]["weights"] for step, state in states.items()}
    assert all(torch.equal(weight, weights[2][name]) for name, weight in weights[1].items())
    assert not all(torch.equal(weight, weights[3][name]) for name, weight in weights[1].items())
    assert all(weight.isfinite().all() for weight in weights[3].values())


def test_a_run_that_learns_from_no_batch_any_more_ends(
    run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A generator whose log-probs are always half a nat off: not one answer is ever near enough."""
    generate = LocalGenerator.generate

    def shifted(generator: LocalGenerator, prompts: Prompts, seed: int) -> Rollouts:
        rollouts = generate(generator, prompts, seed)
        return replace(rollouts, behaviour_logp_BT=rollouts.behaviour_logp_BT - 0.5)

    monkeypatch.setattr(LocalGenerator, "generate", shifted)
    settings = lagging(1, iterations=9, loss={"correct": {"drop": [0.9, 1.1]}})
    with pytest.raises(AllDropped, match="6 iterations in a row were dropped; the last one: all 4 answers"):
        run_ppo(tmp_path, **settings)


def test_a_broken_budget_leads_back_to_what_was_under_way_then(
    run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    kl = {"start": 0.05, "limit": 0.02, "on_limit": "rollback", "max_rollbacks": 1}
    settings = lagging(1, kl=kl, checkpoints={"every": 1}, actor={"lr": 3e-3})
    with pytest.raises(ContractStop, match=r"over the limit of 0\.02 after 1 rollback"):
        run_ppo(tmp_path, **settings)
    stage = tmp_path / "runs/short/ppo"
    assert "kl.rollback" in [event["code"] for event in records(stage / "events.jsonl")]
    assert max(row["age/mean"] for row in records(stage / "metrics.jsonl")) <= 1


def settings_of(**given: Any) -> PPOSettings:
    return PPOSettings.model_validate({"kind": "ppo", "reward": "judge", "prompts": "prompts.jsonl", **given})


def codes(**given: Any) -> dict[str, str]:
    return {finding.code: finding.level for finding in check(settings_of(**given))}


def test_what_cannot_hold_under_a_lag_is_refused_and_what_loosens_is_said() -> None:
    lag = {"generator": {"kind": "local", "lag": 2}}
    sampled = {"policy": {"old_logprobs": "sampled"}}
    assert codes(**lag) == {}
    assert codes(**lag, loss=sampled)["ppo.sampled_lag"] == "fatal"
    assert codes(loss={**sampled, "correct": {"cap": 3.0}})["ppo.sampled_correct"] == "fatal"
    assert "ppo.sampled_correct" not in codes(loss=sampled)
    assert codes(**lag, loss={"correct": None})["ppo.uncorrected_lag"] == "warning"
    assert codes(**lag, iterations=2)["ppo.long_lag"] == "warning"
    (finding,) = check(settings_of(**lag, kl={"limit": 8.0}))
    assert (finding.level, finding.code) == ("info", "ppo.kl_limit_lag")
    assert "may be over it for up to 3 iterations before the run sees it (1 without a lag)" in finding.message
    assert codes(kl={"limit": 8.0}) == {}
    assert "they are 0, 1, 2, 2, … versions old" in explain(settings_of(**lag))[-1]


@pytest.mark.parametrize("lag", [-1, 65, 1.5])
def test_a_lag_is_a_small_number_of_batches(lag: float) -> None:
    with pytest.raises(ValidationError, match="lag"):
        settings_of(generator={"kind": "local", "lag": lag})


def test_stale_answers_and_other_engines_are_corrected_unless_a_recipe_says_otherwise() -> None:
    lag = {"generator": {"kind": "local", "lag": 1}}
    assert settings_of().config().correct is None
    auto = settings_of(**lag).config().correct
    assert auto is not None
    assert (auto.cap, auto.per, auto.drop) == (2.0, "token", None)
    assert settings_of(**lag, loss={"correct": None}).config().correct is None
    asked = settings_of(loss={"correct": {"drop": [0.9, 1.1]}}).config().correct
    assert asked is not None
    assert asked.drop == (0.9, 1.1)
