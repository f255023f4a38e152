"""How long a stage takes: operations and bytes over the rates of the machine, and what no rate explains.

Learning counts the operations of real tokens (2 a weight forward, 4 backward, or 2 where the weights are frozen, 2 more
where activations are recomputed, attention and logits on top). Sampling reads all weights and caches once a token. The
shares and constants below are those of the H200 rows of docs/speed.md of 135M and 0.5B; other cards are scaled by their
data sheets, which is not measured. Several GPUs share the tokens; the exchange between them is that of `scale`.
Left out: answers that end early, evaluation, reward sources that are not models, queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kedge.plan import scale
from kedge.plan.holding import Holding
from kedge.plan.machines import Kind, Machine, links_of
from kedge.plan.memory import StageMemory, frozen_sizes, learning_weights, sampled_rows
from kedge.plan.shapes import ModelShape
from kedge.plan.tensors import MASTER, cache_bytes, weight_bytes
from kedge.plan.work import Sampling, StageWork

LEARN_SHARE: Final[dict[Kind, float]] = {"cuda": 0.40, "cpu": 0.60}
"""Of the machine's operations, forward and backward."""
READ_SHARE: Final[dict[Kind, float]] = {"cuda": 0.40, "cpu": 0.60}
DECODE_SHARE: Final[dict[Kind, float]] = {"cuda": 0.80, "cpu": 0.60}
"""Of the memory's bandwidth, while tokens are sampled."""
PASS_S: Final[dict[Kind, float]] = {"cuda": 0.010, "cpu": 0.02}
"""Of a pass, besides its operations."""
STEP_S: Final[dict[Kind, float]] = {"cuda": 0.030, "cpu": 0.05}
"""Of an optimiser step of one learner: the update, the norm, the host."""
ADAPTER_LAYER_S: Final[dict[Kind, float]] = {"cuda": 0.0008, "cpu": 0.0}
"""Of a layer with adapters in a pass: their products are small, and are waited for."""
TOKEN_LAYER_S: Final[dict[Kind, float]] = {"cuda": 3.0e-5, "cpu": 3.0e-4}
"""Of a layer while one token of all rows is sampled, besides its bytes."""
START_S: Final[dict[Kind, float]] = {"cuda": 7.0, "cpu": 3.0}
"""From the start of a stage to its first step, besides the weights: imports, data, kernels."""
LOAD_RATE: Final = 1.0e9
"""Bytes of weights a second, read in float32, compared and cast."""
SAVE_RATE: Final = 0.8e9
"""Bytes a second, written and hashed."""
HOST_RATE: Final = 2.5e10
"""Bytes a second between a GPU and pinned memory of the host, by the data sheet of PCIe 5 with a share of 0.4."""
LOAD_SHARE: Final = 0.6
"""Of the board's power, on average over a stage; assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of a stage."""

    start: float
    step: float
    """Of one optimiser step, or one iteration, on average."""
    generate: float
    """Of that, sampling."""
    read: float
    """Judging: passes without gradients."""
    learn: float
    save: float
    """Of all checkpoints and the model."""
    total: float


def forward_operations(shape: ModelShape, tokens: float, length: float, layers: int) -> float:
    """Of layers, for so many tokens in rows of `length`: 2 a weight and token, and attention to earlier tokens.

    >>> small = ModelShape(source="", layers=1, width=10, inner=10, heads=1, kv_heads=1, head_dim=10,
    ...     vocabulary=10, is_tied=True, has_bias=False, window=64)
    >>> forward_operations(small, 100, 20, 1)  # 100 · (2 · 720 + 4 · 10 · 10)
    184000.0
    """
    return tokens * layers * (2.0 * shape.layer_weights + 4.0 * shape.query_width * length / 2)


def head_operations(shape: ModelShape, counted: float) -> float:
    return 2.0 * counted * shape.embedding


def learn_operations(work: StageWork, holding: Holding) -> float:
    """Of one optimiser step of one learner, on average."""
    tokens, counted, rows = work.mean_step
    length = tokens / max(1.0, rows)
    trunk = work.shape.layers - work.layers
    if holding.roles == "trunk":
        trunk = holding.trunk_layers or max(1, work.shape.layers // 2)
    forward = forward_operations(work.shape, tokens, length, work.shape.layers - trunk)
    backward = forward * (1.0 if holding.roles == "lora" else 2.0)
    again = forward if holding.recompute else 0.0
    frozen = 0.0 if holding.roles == "trunk" else forward_operations(work.shape, tokens, length, trunk)
    head = head_operations(work.shape, counted) * (2.0 if holding.roles == "lora" else 3.0) if work.has_logits else 0.0
    return forward + backward + again + frozen + head


def stage_time(work: StageWork, memory: StageMemory, machine: Machine) -> StageTime:
    """The seconds of a stage on this machine."""
    start = START_S[machine.kind] + _held_bytes(work) / LOAD_RATE if work.family != "other" else 0.0
    generate = _generate_seconds(work.sampling, work.shape, machine) if work.sampling else 0.0
    if work.holding is None:
        total = start + generate * (work.sampling.times if work.sampling else 0)
        return StageTime(start=start, step=generate, generate=generate, read=0.0, learn=0.0, save=0.0, total=total)
    learn = _learn_seconds(work, work.holding, memory, machine)
    read = _read_seconds(work, machine) + _turn_seconds(work, work.holding, machine)
    in_steps = generate if work.family == "rl" else 0.0
    step = learn + read + in_steps
    between = 0.0 if work.family == "rl" or not work.sampling else generate * work.sampling.times
    save = _save_seconds(work, work.holding)
    total = start + work.members * work.steps * step + between + save
    return StageTime(start=start, step=step, generate=in_steps, read=read, learn=learn, save=save, total=total)


def _learn_seconds(work: StageWork, holding: Holding, memory: StageMemory, machine: Machine) -> float:
    """Of all optimiser steps of an iteration, all learners."""
    kind = machine.kind
    operations = learn_operations(work, holding) / machine.gpus
    passes = memory.passes.mean_passes / memory.passes.shares if memory.passes else 1.0
    adapted = ADAPTER_LAYER_S[kind] * work.shape.layers if holding.roles == "lora" else 0.0
    slower = 1.5 if holding.base_bits != 16 else 1.0
    each = slower * operations / (machine.flops * LEARN_SHARE[kind])
    each += STEP_S[kind] + max(1.0, passes) * (PASS_S[kind] + adapted)
    weights = learning_weights(work, holding, work.learners[0])
    if machine.gpus > 1:
        each += scale.all_reduce_seconds(MASTER * weights, machine.gpus, links_of(machine), 0.8)
    if "optimiser" in holding.offload:
        each += 2 * 12 * weights / HOST_RATE
    return work.updates * len(work.learners) * each


def _read_seconds(work: StageWork, machine: Machine) -> float:
    """Of judging an iteration's rows; of the reference of a preference stage, all of which is read once."""
    tokens, counted, rows = work.mean_step
    if not work.reads or not rows:
        return 0.0
    operations = forward_operations(work.shape, tokens, tokens / rows, work.shape.layers)
    operations += head_operations(work.shape, counted)
    each = work.minibatches * operations / machine.gpus / (machine.flops * READ_SHARE[machine.kind])
    return work.reads * (each + PASS_S[machine.kind])


def _turn_seconds(work: StageWork, holding: Holding, machine: Machine) -> float:
    """Of the frozen roles that wait in host memory, until they are there for their turn; nothing has to go back."""
    waiting = [size for role, size in frozen_sizes(work, holding, machine) if role in holding.offload]
    return sum(waiting) / HOST_RATE


def _generate_seconds(sampling: Sampling, shape: ModelShape, machine: Machine) -> float:
    """Of all answers that are drawn together: prompts are read, then a pass a token, in waves where memory is short."""
    rows, _ = sampled_rows(sampling, shape, machine, machine.memory / 2)
    waves = -(-sampling.answers // (rows * machine.gpus))
    weights = shape.parameters * weight_bytes(machine.kind)
    context = sampling.prompt_tokens + sampling.new_tokens / 2
    moved = weights + rows * context * cache_bytes(shape, machine.kind)
    by_bytes = moved / (machine.bandwidth * DECODE_SHARE[machine.kind])
    operations = rows * (2.0 * shape.parameters + 4.0 * shape.layers * shape.query_width * context)
    by_operations = operations / (machine.flops * READ_SHARE[machine.kind])
    token = max(by_bytes, by_operations) + shape.layers * TOKEN_LAYER_S[machine.kind]
    read = forward_operations(shape, rows * sampling.prompt_tokens, sampling.prompt_tokens, shape.layers)
    prompts = read / (machine.flops * READ_SHARE[machine.kind]) + PASS_S[machine.kind]
    return waves * (prompts + sampling.new_tokens * token)


def _held_bytes(work: StageWork) -> float:
    models = len(work.learners) + work.rewards + work.reference
    if work.holding is not None and work.holding.roles == "lora":
        models = 1 + (0 if "lora" in work.shared_reward else work.rewards)
    return max(1, models) * MASTER * work.shape.parameters


def _save_seconds(work: StageWork, holding: Holding) -> float:
    """Of checkpoints, with moments and float32 weights, and of the whole model at the end."""
    learning = sum(learning_weights(work, holding, role) for role in work.learners)
    return (work.saves * 12 * learning + MASTER * work.shape.parameters) / SAVE_RATE
