"""PPO on the toy shop, whose rule is known: the true score rises within the KL budget, however the roles are held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.testing import toy

PPO = """
  ROLES:
    kind: ppo
    from: sft
    reward: {kind: function, path: "rules.py:true"}
    prompts: prompts.jsonl
    roles: ROLES
    memory: {dtype: float32}
    iterations: 25
    batch: 64
    minibatches: 4
    epochs: 2
    micro_batch: 64
    max_prompt_tokens: 64
    sampling: {max_new_tokens: 24}
    kl: {start: 0.05, limit: LIMIT}
    actor: {lr: RATE, beta2: 0.98, schedule: cosine, eps: 1e-8}
    critic: {lr: 2e-3, schedule: cosine, eps: 1e-8}
    critic_warmup: 3
    logging: {every: 1000}
"""
RATES = {"separate": "1e-3", "lora": "3e-3", "trunk": "1e-3"}
LIMIT = 15.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_way_to_hold_the_roles_raises_the_true_score_within_the_budget(
    seed: int,
    kedge: Callable[..., int],
    rows: Callable[..., Path],
    shop: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows("prompts.jsonl", toy.prompts(800, seed + 10))
    stages = (
        PPO.replace("ROLES", way).replace("RATE", rate).replace("LIMIT", str(LIMIT)) for way, rate in RATES.items()
    )
    shop(seed, "".join(stages))
    assert kedge("run", "shop.yaml", "--no-check") == 0
    gains: dict[str, float] = {}
    for way in RATES:
        lines = (tmp_path / "runs/shop" / way / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert len(found) == 25
        assert max(one["kl/mean"] for one in found) < LIMIT
        gains[way] = sum(one["reward/mean"] for one in found[-5:]) / 5 - found[0]["reward/mean"]
    # 2.5 of at most 4 at the start: half a point is a third of what is to be had.
    assert {way: gain for way, gain in gains.items() if gain < 0.5} == {}
    assert max(gains.values()) - min(gains.values()) < 0.6
