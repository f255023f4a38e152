"""Online DPO on the toy shop: pairs of the policy's own answers, labelled by the true rule, raise it over SFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.testing import toy

STAGES = """
  online:
    kind: preference
    from: sft
    method: dpo
    online:
      rounds: 3
      prompts: prompts.jsonl
      reward: {kind: function, path: "rules.py:true"}
      answers: 4
      max_prompt_tokens: 40
      sampling: {max_new_tokens: 24}
      rows: 128
    batch: 32
    micro_batch: 32
    max_length: 64
    epochs: 2
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: 5e-4, beta2: 0.98}
  eval:
    kind: evaluate
    models: [sft, online]
    prompts: heldout.jsonl
    reward: {kind: function, path: "rules.py:true"}
    max_new_tokens: 24
    dtype: float32
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_online_dpo_raises_the_true_score_over_sft(
    seed: int,
    kedge: Callable[..., int],
    rows: Callable[..., Path],
    shop: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows("prompts.jsonl", toy.prompts(300, seed + 20))
    rows("heldout.jsonl", toy.prompts(400, seed + 40))
    shop(seed, STAGES)
    assert kedge("run", "shop.yaml", "--no-check") == 0
    stage = tmp_path / "runs/shop/online"
    found = json.loads((tmp_path / "runs/shop/eval/evaluation.json").read_text())["comparisons"]["online"]
    assert found["reward"]["gain"]["low"] > 0.1
    lines = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    rounds = [one for one in lines if "online/round" in one]
    assert [one["online/round"] for one in rounds] == [0, 1, 2, -1]
    scores = [one["reward/mean"] for one in rounds]
    assert scores == sorted(scores)  # every round is better than the one before
    assert kedge("data", "check", stage / "pairs-1.jsonl") == 0
