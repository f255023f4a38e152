"""The toy shop, whose rule is known: methods without a critic raise the true score over SFT, GRPO to PPO's level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.core.plugins import names
from kedge.testing import toy

STAGE = """
  NAME:
    kind: KIND
    from: sft
    reward: {kind: function, path: "rules.py:true"}
    prompts: prompts.jsonl
    roles: separate
    memory: {dtype: float32}
    iterations: 25
    batch: 16
    answers: 8
    minibatches: STEPS
    epochs: 1
    micro_batch: 128
    max_prompt_tokens: 64
    sampling: {max_new_tokens: 24}
    actor: {lr: RATE, beta2: 0.98, schedule: cosine, eps: 1e-8}
    logging: {every: 1000}
    checkpoints: {every: 1000}
"""
ON_POLICY = ("rloo", "reinforce", "remax")


def stage_of(name: str) -> str:
    """Methods without a ratio take one step a batch, and so a larger one."""
    kind = "ppo" if name == "ppo" else "group\n    method: " + name
    steps, rate = ("1", "2e-3") if name in ON_POLICY else ("4", "1e-3")
    text = STAGE.replace("NAME", name.replace("+", "p")).replace("KIND", kind)
    text = text.replace("STEPS", steps).replace("RATE", rate)
    critic = "    critic: {lr: 2e-3, schedule: cosine, eps: 1e-8}\n    critic_warmup: 3\n"
    return text + (critic if name == "ppo" else "")


def earned(stage: Path) -> tuple[float, float]:
    """The mean true score of sampled answers at the start, and at the end of the run."""
    found = [json.loads(line)["reward/mean"] for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return found[0], sum(found[-5:]) / 5


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_method_raises_the_true_score_and_grpo_to_the_level_of_ppo(
    seed: int,
    kedge: Callable[..., int],
    rows: Callable[..., Path],
    shop: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows("prompts.jsonl", toy.prompts(800, seed + 10))
    methods = ("ppo", *names("algorithms"))
    shop(seed, "".join(map(stage_of, methods)))
    assert kedge("run", "shop.yaml", "--no-check") == 0
    found = {name: earned(tmp_path / "runs/shop" / name.replace("+", "p")) for name in methods}
    assert {name: end - start for name, (start, end) in found.items() if end < start + 0.3} == {}
    assert abs(found["grpo"][1] - found["ppo"][1]) < 0.35
