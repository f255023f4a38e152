"""How much of everything the study of overoptimisation does: in full, and small for tests."""

from __future__ import annotations

from dataclasses import dataclass

import overoptimisation_data as data
from common import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    model: str
    labels: tuple[int, ...]
    heldout: int
    """Pairs without noise on which proxies are measured."""
    ensembles: tuple[int, ...]
    """Numbers of labels from which ensembles learn too; PPO is run on those of the first."""
    gold_members: int
    members: int
    most: int
    """The largest n of best-of-N."""
    answers: int
    """To a prompt: a few more than `most`, for one without a text has no score."""
    counts: data.Counts
    tokens: int
    """Of an answer at most."""
    iterations: int
    at_once: int
    """Runs side by side on one device."""
    device: str
    gold: Record
    sft: Record
    proxy: Record
    ppo: Record
    """Settings of the stages that depend on the size."""

    def epochs(self, labels: int) -> float:
        """Passes of a proxy: at least so many that few labels are learnt at all.

        >>> [FULL.epochs(labels) for labels in (100, 300, 1000, 3000)]
        [10, 5, 3, 2]
        """
        return next((passes for most, passes in ((100, 10), (300, 5), (1000, 3)) if labels <= most), 2)


QUIET: Record = {"eval": {"every": 100000}, "checkpoints": {"every": 100000}}
FULL = Plan(
    model="smollm2-135m",
    labels=(100, 300, 1000, 3000),
    heldout=300,
    ensembles=(1000,),
    gold_members=3,
    members=4,
    most=1024,
    answers=1056,
    counts=data.Counts(best_of_n=32, ppo=128, labels=4400, demonstrations=4000),
    tokens=48,
    iterations=50,
    at_once=8,
    device="auto",
    gold={
        "batch": 32,
        "micro_batch": 32,
        "max_length": 512,
        "epochs": 3,
        "loss": {"length_control": "balance"},
        "optimiser": {"lr": 5e-5},
    },
    sft={"batch": 32, "micro_batch": 32, "max_length": 256, "optimiser": {"lr": 5e-5}},
    proxy={"batch": 16, "micro_batch": 16, "max_length": 256, "optimiser": {"lr": 3e-5}},
    ppo={
        "roles": "lora",
        "batch": 128,
        "epochs": 1,
        "minibatches": 4,
        "micro_batch": 64,
        "max_prompt_tokens": 200,
        "too_long": "drop",
        "memory": {"generate_rows": 128},
        "actor": {"lr": 2e-4, "eps": 1e-8, "schedule": "constant"},
        "critic": {"lr": 2e-4, "eps": 1e-8, "schedule": "constant"},
    },
)
SMALL = Plan(
    model="tiny",
    labels=(12, 24),
    heldout=8,
    ensembles=(24,),
    gold_members=2,
    members=2,
    most=40,
    answers=48,
    counts=data.Counts(best_of_n=4, ppo=8, labels=40, demonstrations=24),
    tokens=8,
    iterations=13,
    at_once=1,
    device="cpu",
    gold={"batch": 8, "micro_batch": 8, "max_length": 160, "optimiser": {"lr": 1e-3}},
    sft={"batch": 8, "micro_batch": 8, "max_length": 160, "optimiser": {"lr": 3e-3}},
    proxy={"batch": 8, "micro_batch": 8, "max_length": 160, "optimiser": {"lr": 1e-3}},
    ppo={
        "roles": "lora",
        "batch": 8,
        "epochs": 1,
        "minibatches": 1,
        "micro_batch": 8,
        "actor": {"lr": 3e-3, "eps": 1e-8, "schedule": "constant"},
        "critic": {"lr": 3e-3, "eps": 1e-8, "schedule": "constant"},
    },
)
