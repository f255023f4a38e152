"""Verifiable rewards: a tiny model that SFT left weak at sums is raised by GRPO, on sums that neither has seen.

It is weak because its teacher is careless: two answers in five are one too many.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kedge.core.records import repeated
from kedge.data.examples import Message
from kedge.data.template import encode_prompt, stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.reward import decoded
from kedge.stages.shared.tokenizer import tokenizer_for
from kedge.trainers.shared import sampled_tokens

RECIPE = """
kedge: 1
name: sums
seed: 5
model: ./small
device: cpu
stages:
  sft:
    kind: sft
    data: demonstrations.jsonl
    epochs: 60
    batch: 32
    micro_batch: 32
    max_length: 64
    samples: 0
    optimiser: {lr: 3e-3, beta2: 0.98, weight_decay: 0.3}
  grpo:
    kind: group
    from: sft
    method: grpo
    reward: {kind: exact}
    prompts: prompts.jsonl
    roles: separate
    memory: {dtype: float32}
    iterations: 80
    batch: 32
    minibatches: 4
    micro_batch: 256
    max_prompt_tokens: 40
    sampling: {max_new_tokens: 4}
    actor: {lr: 1e-3, beta2: 0.98, schedule: cosine, eps: 1e-8}
    logging: {every: 1000}
    checkpoints: {every: 1000}
"""
Sum = tuple[str, str]


def sums() -> list[Sum]:
    """All of a number below 90 and a digit, shuffled: every digit is met with most of the others, few sums are."""
    found = [(f"{number:02d}+{digit}=", f"{number + digit:02d}") for number in range(90) for digit in range(10)]
    Random(1).shuffle(found)
    return found


def taught(known: list[Sum]) -> list[dict[str, Any]]:
    """Conversations with the careless teacher."""
    rng = Random(2)
    said = [(prompt, f"{int(right) + (rng.random() < 0.4):02d}") for prompt, right in known]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]


def exact_match(folder: Path, cases: list[Sum]) -> float:
    """Share of right answers, one sampled for each."""
    model, tokenizer = load_causal(str(folder), dtype="float32", device="cpu"), tokenizer_for(str(folder), None)
    generator = LocalGenerator(
        model,
        SamplingSettings(max_new_tokens=4),
        stop_ids=stop_ids(tokenizer),
        pad=padding_id(tokenizer),
        max_rows=len(cases),
    )
    asked = [encode_prompt(tokenizer, (Message("user", prompt),)) for prompt, _ in cases]
    found = sampled_tokens(generator.generate(repeated(asked, ids=range(len(asked)), answers=1), seed=3))
    answers = [decoded(tokenizer, tokens[:-1]) for tokens in found]
    return sum(answer == right for answer, (_, right) in zip(answers, cases, strict=True)) / len(cases)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_grpo_raises_exact_match_on_sums_that_were_held_out(
    kedge: Callable[..., int], rows: Callable[..., Path], tmp_path: Path
) -> None:
    make_tiny(tmp_path / "small", hidden=64, layers=2)
    cases = sums()
    heldout, known = cases[:200], cases[200:]
    rows("demonstrations.jsonl", taught(known))
    rows("prompts.jsonl", ({"prompt": one, "answer": right} for one, right in known))
    (tmp_path / "sums.yaml").write_text(RECIPE)
    assert kedge("run", "sums.yaml", "--no-check") == 0
    weak, raised = (exact_match(tmp_path / "runs/sums" / name / "model", heldout) for name in ("sft", "grpo"))
    assert 0.1 < weak < 0.6
    assert raised > weak + 0.2
