"""A planted exploit and the KL budget: the run stops, rolls back or pauses with it, and runs away without it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.core.errors import ContractStop
from kedge.monitor.overoptimisation import Fit, PassedPeak, fit
from kedge.runs.folder import Run, status_of
from kedge.runs.state import load_state
from kedge.stages.rl import run as rl_run

Recipe = Callable[..., Path]
Kedge = Callable[..., int]
Records = Callable[[Path], list[dict[str, Any]]]

EXPLOIT: dict[str, Any] = {
    "rules": "def one_token(answer):\n    return float(answer.text.count('e'))\n",
    "reward": {"kind": "function", "path": "rules.py:one_token"},
    "iterations": 6,
    "batch": 16,
    "micro_batch": 16,
    "epochs": 2,
    "actor": {"lr": 0.06},
}
LIMIT = 5.0
FORGETFUL = """
from pathlib import Path

def forgetful(answers):
    calls = Path(__file__).with_name("calls")
    calls.write_text((calls.read_text() if calls.exists() else "") + ".")
    if calls.read_text() == "..":
        return [None] * len(answers)
    return [None, *(float(one.text < "P") for one in answers[1:])]
"""


@pytest.fixture(scope="module")
def runaway(run_ppo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the exploit does where nothing stops it."""
    return run_ppo(tmp_path_factory.mktemp("runaway"), **EXPLOIT, kl={"start": 0.01})


def test_without_a_limit_the_exploit_runs_away(runaway: Path, records: Records, ppo_home: Path) -> None:
    found = records(runaway / "metrics.jsonl")
    assert len(found) == 6
    assert found[0]["kl/mean"] == 0.0
    assert max(one["kl/mean"] for one in found) > 4 * LIMIT
    assert measured_kl(runaway / "model", ppo_home) > 4 * LIMIT


def test_stop_keeps_the_last_policy_within_the_budget(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, runaway: Path, ppo_home: Path, tmp_path: Path
) -> None:
    recipe = ppo_recipe(tmp_path, **EXPLOIT, kl={"start": 0.01, "limit": LIMIT})
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 3
    stage = tmp_path / "runs/short/ppo"
    assert status_of(stage) == "stopped"
    # The same run as the other up to the limit: its steps are a beginning of the other's.
    found, whole = records(stage / "metrics.jsonl"), records(runaway / "metrics.jsonl")
    assert found == whole[: len(found)]
    assert found[-1]["kl/mean"] <= LIMIT < whole[len(found)]["kl/mean"]
    (event,) = [one for one in records(stage / "events.jsonl") if one["code"] == "kl.limit"]
    assert (event["level"], event["evidence"]["limit"]) == ("fatal", LIMIT)
    assert event["evidence"]["kl"] == whole[len(found)]["kl/mean"]
    # Iteration n finds out about the policy of step n - 1.
    good = len(found) - 1
    assert Run.open(stage, for_writing=False).checkpoints.pins() == {"good": good}
    assert event["step"] == good
    assert_is_policy_of(stage, good)
    assert 0.05 < measured_kl(stage / "model", ppo_home) < LIMIT
    # Taken up again as it is, it stops again.
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 3
    assert_is_policy_of(stage, good)


def test_a_rollback_goes_on_with_a_larger_coefficient(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, runaway: Path, tmp_path: Path
) -> None:
    budget = {"start": 0.01, "limit": 8.0, "on_limit": "rollback", "rollback_factor": 100.0}
    recipe = ppo_recipe(tmp_path, **EXPLOIT, kl=budget)
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 0
    stage = tmp_path / "runs/short/ppo"
    (event,) = [one for one in records(stage / "events.jsonl") if one["code"] == "kl.rollback"]
    assert event["level"] == "warning"
    assert event["evidence"]["coef"] == 0.01
    found, whole = records(stage / "metrics.jsonl"), records(runaway / "metrics.jsonl")
    good: int = event["step"]
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5, 6]
    assert found[:good] == whole[:good]
    assert found[good]["kl/mean"] == whole[good]["kl/mean"]  # the same weights and answers once more
    assert [one["kl/coef"] for one in found] == [*[0.01] * good, *[1.0] * (6 - good)]
    assert max(one["kl/mean"] for one in found) <= 8.0
    assert status_of(stage) == "done"


def test_after_so_many_rollbacks_the_run_stops(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, tmp_path: Path
) -> None:
    budget = {"start": 0.01, "limit": LIMIT, "on_limit": "rollback", "rollback_factor": 1.1, "max_rollbacks": 2}
    recipe = ppo_recipe(tmp_path, **EXPLOIT, kl=budget)
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 3
    stage = tmp_path / "runs/short/ppo"
    told = [one for one in records(stage / "events.jsonl") if one["code"].startswith("kl.")]
    assert [one["code"] for one in told] == ["kl.rollback", "kl.rollback", "kl.limit"]
    assert [one["evidence"]["rollbacks"] for one in told] == [0, 1, 2]
    assert [one["evidence"]["coef"] for one in told] == pytest.approx([0.01, 0.011, 0.0121], rel=1e-6)
    assert_is_policy_of(stage, told[-1]["step"])
    # Killed and taken up again, it has not forgotten how often it went back.
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--resume") == 3
    told = [one["code"] for one in records(stage / "events.jsonl") if one["code"].startswith("kl.")]
    assert told == ["kl.rollback", "kl.rollback", "kl.limit"]


def test_a_rollback_that_is_killed_before_it_is_saved_is_told_once(
    run_ppo: Callable[..., Path], records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"start": 0.01, "limit": 8.0, "on_limit": "rollback", "rollback_factor": 100.0}
    save = rl_run.RLRun.save

    def fall(run: rl_run.RLRun) -> None:
        if run.rollbacks:
            raise SystemError("killed")
        save(run)

    with monkeypatch.context() as patched:
        patched.setattr(rl_run.RLRun, "save", fall)
        with pytest.raises(SystemError):
            run_ppo(tmp_path, **EXPLOIT, kl=budget)
    stage = tmp_path / "runs/short/ppo"
    assert [one["code"] for one in records(stage / "events.jsonl")].count("kl.rollback") == 1
    run_ppo(tmp_path, resumed=True, **EXPLOIT, kl=budget)
    assert [one["code"] for one in records(stage / "events.jsonl")].count("kl.rollback") == 1
    assert status_of(stage) == "done"


@pytest.mark.parametrize("every", [1, 5])
def test_a_pause_goes_on_as_if_the_limit_had_been_higher(
    every: int, ppo_recipe: Recipe, kedge: Kedge, records: Records, runaway: Path, tmp_path: Path
) -> None:
    budget = {"start": 0.01, "limit": LIMIT, "on_limit": "pause"}
    recipe = ppo_recipe(tmp_path, **EXPLOIT, kl=budget, checkpoints={"every": every})
    assert kedge("run", recipe, "--runs", tmp_path / "runs", "--no-check") == 3
    stage = tmp_path / "runs/short/ppo"
    paused = len(records(stage / "metrics.jsonl"))
    assert Run.open(stage, for_writing=False).checkpoints.steps()[-1] == paused < 6
    codes = [one["code"] for one in records(stage / "events.jsonl")]
    assert codes == ["policy.large_steps", "kl.limit", "run.stopped"], "the detector sees it coming"
    resume = ("run", recipe, "--runs", tmp_path / "runs", "--resume")
    assert kedge(*resume) == 3
    assert kedge(*resume, "--set", "stages.ppo.kl.limit=1000") == 0
    assert records(stage / "metrics.jsonl") == records(runaway / "metrics.jsonl")
    assert (stage / "model/model.safetensors").read_bytes() == (runaway / "model/model.safetensors").read_bytes()


def test_a_pause_after_a_dropped_iteration_saves_the_step_that_the_weights_are_at(
    run_ppo: Callable[..., Path], records: Records, tmp_path: Path
) -> None:
    """The journal has no line of a dropped iteration; the batch that broke the budget comes again after the pause."""
    budget = {"start": 0.01, "limit": 0.1, "on_limit": "pause"}
    with pytest.raises(ContractStop, match="everything is saved as it is at step 2"):
        run_ppo(
            tmp_path,
            rules=FORGETFUL,
            reward={"kind": "function", "path": "rules.py:forgetful"},
            actor={"lr": 0.1},
            iterations=5,
            kl=budget,
            failures={"max_share": 1.0},
            checkpoints={"every": 9},
        )
    stage = tmp_path / "runs/short/ppo"
    assert [one["step"] for one in records(stage / "metrics.jsonl")] == [1]
    (event,) = [one for one in records(stage / "events.jsonl") if one["code"] == "kl.limit"]
    assert event["step"] == 2
    state = load_state(stage / "checkpoints/step-000002")
    ((tally,),) = state["failures"]
    assert (state["step"], tally["rows"], tally["failed"]) == (2, 8, 1 + 4)


def test_the_run_stops_at_the_predicted_peak_of_the_gold_score_if_asked(
    ppo_recipe: Recipe, kedge: Kedge, records: Records, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found by a fit to points of a law whose peak is known: 3 d - d ln d is largest at d = e^2, a KL of e^4."""
    distances = [0.5 * number for number in range(1, 40)]
    law = fit([d * d for d in distances], [3 * d - d * math.log(d) for d in distances], kind="rl")
    assert isinstance(law, Fit)
    assert law.peak_kl == pytest.approx(math.exp(4), rel=1e-6)
    peak = PassedPeak(kl=law.peak_kl, kl_interval=law.peak_kl_interval, kl_now=law.kl, is_predicted=True)
    monkeypatch.setattr(rl_run, "passed_peak", lambda metrics: peak if len(metrics) == 2 else None)
    settings = {"iterations": 4, "gold": {"kind": "function", "path": "rules.py:plain"}, "checkpoints": {"every": 9}}
    recipe = ppo_recipe(tmp_path, **settings, stop={"overoptimisation": True})
    command = ("run", recipe, "--runs", tmp_path / "runs")
    assert kedge(*command, "--no-check") == 3
    stage = tmp_path / "runs/short/ppo"
    assert len(records(stage / "metrics.jsonl")) == 2
    (event,) = [one for one in records(stage / "events.jsonl") if one["code"] == "overoptimisation.peak"]
    assert (event["level"], event["step"]) == ("fatal", 2)
    assert "predicted peak at a KL of 54.6 nats" in event["message"]
    assert_is_policy_of(stage, 2)
    assert kedge(*command, "--resume", "--set", "stages.ppo.stop.overoptimisation=false") == 0
    assert [one["step"] for one in records(stage / "metrics.jsonl")] == [1, 2, 3, 4]


def assert_is_policy_of(stage: Path, step: int) -> None:
    kept = load_state(stage / f"checkpoints/step-{step:06d}")["roles"]["policy"]["train_step"]["weights"]
    found = load_file(stage / "model/model.safetensors")
    assert found.keys() == kept.keys()
    for name, one in found.items():
        assert torch.equal(one, kept[name]), name


def measured_kl(folder: Path, home: Path) -> float:
    """KL in nats an answer over 8 sampled tokens, by plain transformers: exact at each token, one row at a time."""
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference: Any = AutoModelForCausalLM.from_pretrained(home / "tiny", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(home / "tiny")
    total, draw = 0.0, torch.Generator().manual_seed(3)
    prompts = [json.loads(line)["prompt"] for line in (home / "prompts.jsonl").read_text().splitlines()]
    for prompt in prompts:
        said = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        tokens_1T = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        for _ in range(8):
            with torch.no_grad():
                mine_V, theirs_V = (one(tokens_1T).logits[0, -1].log_softmax(-1) for one in (policy, reference))
            total += (mine_V.exp() * (mine_V - theirs_V)).sum().item()
            token_1 = torch.multinomial(mine_V.exp(), 1, generator=draw)
            if token_1.item() == tokenizer.eos_token_id:
                break
            tokens_1T = torch.cat([tokens_1T, token_1[None]], dim=1)
    return total / len(prompts)
