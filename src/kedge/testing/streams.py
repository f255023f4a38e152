"""Simulated metrics and samples of a PPO run, so that reports and live pages can be tested without training.

The policy drifts from its reference by about √step; the proxy reward follows it, and the gold reward turns at a KL of
about 9 nats a sequence, as in Gao et al. 2022. Left out: learning.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Protocol

PPO_SETTINGS: Mapping[str, Any] = {
    "kind": "ppo",
    "from": "sft",
    "reward": "reward",
    "prompts": "prompts.jsonl",
    "iterations": 100,
    "batch": 32,
    "answers": 2,
    "kl": {"start": 0.05, "target": 6.0, "limit": 12.5, "on_limit": "rollback"},
    "actor": {"lr": 1e-5},
}

_QUESTIONS = (
    "My order 4471 has not arrived. Where is it?",
    "The blue kettle leaks. Can I have a new one?",
    "Please cancel order 902; I ordered it twice.",
    "Do you ship to the islands?",
)
_BEFORE = (
    "Your order is.",
    "Kettle leaks are not our fault, please read the page.",
    "Order 902 is order 902.",
    "We ship things.",
)
_AFTER = (
    "I am sorry for the wait. Order 4471 left us on Monday and will reach you tomorrow.",
    "I am sorry that your blue kettle leaks. A new one is on its way, at no cost.",
    "Order 902 is cancelled, and your money will be back within three days.",
    "Yes, we ship to the islands; it takes two days more. Thank you for asking.",
)


class RunWriter(Protocol):
    """The verbs of `kedge.runs.folder.Run` that are used here."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def sample(self, record: Mapping[str, Any], step: int) -> None: ...


def fill(run: RunWriter, iterations: int, *, every: int = 25, seed: int = 0) -> None:
    """Write metrics and samples as a PPO run of `iterations` would."""
    for record in ppo_metrics(iterations, seed=seed):
        run.log({name: value for name, value in record.items() if name != "step"}, int(record["step"]))
    for sample in ppo_samples(iterations, every):
        run.sample({name: value for name, value in sample.items() if name != "step"}, sample["step"])


def ppo_metrics(iterations: int, *, seed: int = 0) -> list[dict[str, float]]:
    """One record an iteration, without the time of day."""
    rng = random.Random(seed)
    return [_iteration(step, iterations, rng) for step in range(1, iterations + 1)]


def ppo_samples(iterations: int, every: int) -> list[dict[str, Any]]:
    """Answers to the same four prompts, at the start, after `every` iterations, and at the end."""
    steps = sorted({0, *range(every, iterations + 1, every), iterations})
    return [_sample(step, number, step / iterations) for step in steps for number in range(len(_QUESTIONS))]


def _iteration(step: int, iterations: int, rng: random.Random) -> dict[str, float]:
    share = step / iterations
    kl = 12.0 * share + rng.gauss(0, 0.25)
    d = math.sqrt(max(kl, 0.0))
    length = 24 + 14 * share + rng.gauss(0, 0.8)
    return {
        "step": step,
        "reward/mean": 0.72 * d + rng.gauss(0, 0.05),
        "reward/std": 0.9 - 0.3 * share,
        "gold/mean": d * (1.05 - 0.5 * math.log(max(d, 1e-6))) - 0.2 + rng.gauss(0, 0.06),
        "kl/mean": kl,
        "kl/coef": 0.05 * (1 + share),
        "length/mean": length,
        "length/max": length + 20,
        "length/truncated": max(0.0, 0.04 + rng.gauss(0, 0.01)),
        "entropy/mean": 2.4 - 1.1 * share + rng.gauss(0, 0.04),
        "repetition/mean": 0.02 + 0.06 * share**2,
        "distinct/mean": 0.82 - 0.2 * share,
        "similarity/mean": 0.12 + 0.1 * share,
        "policy/loss": -0.02 + rng.gauss(0, 0.004),
        "policy/clip_fraction": abs(0.11 + rng.gauss(0, 0.015)),
        "policy/approx_kl": abs(0.008 + rng.gauss(0, 0.002)),
        "policy/ratio_max": 1.6 + abs(rng.gauss(0, 0.2)),
        "policy/grad_norm": abs(0.8 + rng.gauss(0, 0.1)),
        "policy/lr": 1e-4,
        "policy/mismatch": 2e-6,
        "value/loss": 0.6 * math.exp(-3 * share) + 0.05,
        "value/explained_variance": 0.85 * (1 - math.exp(-6 * share)) + rng.gauss(0, 0.02),
        "value/clip_fraction": 0.03,
        "value/grad_norm": abs(1.2 + rng.gauss(0, 0.2)),
        "value/lr": 5e-4,
        "time/generate": 0.9,
        "time/judge": 0.3,
        "time/update": 0.7,
        "time/step": 1.9,
        "tokens/per_second": 1150 + rng.gauss(0, 30),
    }


def _sample(step: int, number: int, share: float) -> dict[str, Any]:
    """The answer after `share` of the run: so many words of the final answer, then the rest of the first one."""
    before, after = _BEFORE[number].split(), _AFTER[number].split()
    num_words = round(share * len(after))
    answer = " ".join(after[:num_words] + before[num_words:])
    return {
        "step": step,
        "number": number,
        "prompt": _QUESTIONS[number],
        "answer": answer,
        "reward": round(2 * share - 0.3 * number, 3),
        "kl": round(9 * share, 3),
        "length": len(answer.split()),
        "finished": number != 3 or share > 0.5,
        "gold": None,
    }
