"""Stages made of numbers, for tests of the plan: no recipe, no data, no model."""

from __future__ import annotations

from dataclasses import replace

from kedge.plan.holding import Holding
from kedge.plan.lengths import Row
from kedge.plan.machines import CARDS, Machine
from kedge.plan.shapes import ModelShape
from kedge.plan.work import Sampling, StageWork, Step

H200 = CARDS["h200"]
BIG = replace(H200, memory=2**50)
"""Memory enough for anything."""
SMALL = ModelShape(
    source="135m",
    layers=30,
    width=576,
    inner=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49_152,
    is_tied=True,
    has_bias=False,
    window=8192,
)
HALF = ModelShape(
    source="0.5b",
    layers=24,
    width=896,
    inner=4864,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocabulary=151_936,
    is_tied=True,
    has_bias=True,
    window=8192,
)
SEVEN = ModelShape(
    source="7b",
    layers=28,
    width=3584,
    inner=18_944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=151_936,
    is_tied=False,
    has_bias=True,
    window=8192,
)


def rows(count: int, tokens: int, counted: int) -> Step:
    return [(Row(tokens, counted),) for _ in range(count)]


def sft(shape: ModelShape, holding: Holding | None = None, *, step: Step | None = None) -> StageWork:
    return StageWork(
        name="sft",
        kind="sft",
        family="supervised",
        shape=shape,
        holding=holding or Holding(roles="full"),
        learners=("model",),
        layers=shape.layers,
        steps=10,
        looked=[step or rows(32, 200, 100)],
    )


def ppo(shape: ModelShape, holding: Holding | None = None) -> StageWork:
    return StageWork(
        name="ppo",
        kind="ppo",
        family="rl",
        shape=shape,
        holding=holding or Holding(roles="separate"),
        learners=("policy", "critic"),
        layers=shape.layers,
        reference=True,
        rewards=1,
        steps=10,
        updates=8,
        minibatches=4,
        looked=[rows(16, 280, 128)],
        batch_tokens=64 * 280,
        sampling=Sampling(answers=64, prompt_tokens=150.0, longest_prompt=640, new_tokens=128, rows="auto", times=10),
        reads=4.0,
    )


def on(machine: Machine, gpus: int) -> Machine:
    return replace(machine, gpus=gpus)
