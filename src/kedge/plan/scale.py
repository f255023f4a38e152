"""The time, memory and idle share of one RL step on so many GPUs, from rates: a model, not a measurement.

Each function is one closed formula. Work is counted (operations, bytes), divided by a rate of the hardware and by the
share of it that software reaches. Left out: answers of unlike length, pipeline parallelism, mixtures of experts, disks.

P parameters, T tokens of a row, G GPUs of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

Weights = Literal["replicate", "shard", "hsdp"]
Engines = Literal["shared", "separate"]
GRADIENT_BYTES: Final = 4
"""Gradients are added up in float32."""
WEIGHT_BYTES: Final = 2
"""Weights compute, and are handed over, in bfloat16."""
STATE_BYTES: Final = 16
"""Of a learner's parameter: float32 master, two moments of Adam, gradient."""
_LAYER_BYTES: Final = 34
"""Activations of one layer, bytes a token and unit of width, while it is computed (Korthikanti et al. 2022, eq. 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of one GPU and its links, bytes and operations a second."""

    flops: float
    """Of large bfloat16 matrix products."""
    bandwidth: float
    """Of its memory."""
    memory: float
    """Bytes."""
    nvlink: float
    """To the other GPUs of the machine, in one direction."""
    network: float
    """To other machines, in one direction, its share."""
    gpus: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How much of the hardware's rates the software reaches."""

    learn: float
    """Of `flops`, forward and backward."""
    read: float
    """Of `flops`, forward alone."""
    decode: float
    """Of `bandwidth`, while tokens are sampled."""
    links: float = 0.8
    """Of `nvlink` and `network`."""
    token_s: float = 0.0
    """Seconds of a decoding pass that no rate explains: launches, sampling, the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder."""

    parameters: float
    layers: int
    width: int
    kv_width: int
    """Numbers of a token's keys in one layer: heads of keys × their width."""

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token.

        >>> Shape(parameters=7.6e9, layers=28, width=3584, kv_width=512).cache_bytes
        57344
        """
        return 2 * self.layers * self.kv_width * WEIGHT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step: answers are sampled, judged and learnt from."""

    policy: Shape
    answers: int
    prompt_tokens: int
    answer_tokens: int
    critic: Shape | None = None
    frozen: tuple[Shape, ...] = ()
    """Models that only read every row once: the reference, reward models."""
    rescored: bool = True
    """Those that learn read every row once before the update: old log-probs, values."""
    epochs: int = 1
    updates: int = 1
    """Optimiser steps an epoch."""
    recompute: bool = True
    """Activations are computed again in the backward pass, a third more work."""
    row_tokens_at_once: int = 16_384
    """Tokens of a micro-batch in one process."""

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> int:
        return self.answers * self.length

    @property
    def learners(self) -> tuple[Shape, ...]:
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    @property
    def readers(self) -> tuple[Shape, ...]:
        """Models that read every row once, before anything is learnt."""
        return (*self.frozen, *(self.learners if self.rescored else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who computes where."""

    gpus: int
    engines: Engines = "shared"
    """`shared`: all GPUs sample, then all learn; `separate`: `samplers` of them only sample."""
    samplers: int = 0
    tensor_parallel: int = 1
    weights: Weights = "replicate"
    lag: int = 0
    """Batches under way: from 1 on, sampling and learning go on at the same time. Needs separate engines."""

    @property
    def num_sampling(self) -> int:
        return self.gpus if self.engines == "shared" else self.samplers

    @property
    def num_learning(self) -> int:
        return self.gpus if self.engines == "shared" else self.gpus - self.samplers


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of the phases of one step, how long it takes, and the share of GPU seconds in which nothing is done."""

    generate: float
    judge: float
    learn: float
    sync: float
    """Weights on their way to the engines."""
    seconds: float
    idle: float
    memory: float
    """Bytes of the fullest GPU."""


def attention_flops(shape: Shape, length: int) -> float:
    """Operations a token spends on earlier tokens in one forward pass, half of `length` of them on average: a product
    with the keys and one with the values.

    >>> attention_flops(Shape(parameters=0, layers=2, width=10, kv_width=10), 100)
    4000.0
    """
    return 4.0 * shape.layers * shape.width * (length / 2)


def read_seconds(shape: Shape, tokens: float, length: int, machine: Machine, share: float, gpus: int) -> float:
    """One forward pass: 2 operations a parameter and token."""
    return tokens * (2 * shape.parameters + attention_flops(shape, length)) / (gpus * machine.flops * share)


def learn_seconds(work: Work, shape: Shape, machine: Machine, share: float, gpus: int) -> float:
    """Forward, backward (twice as much) and, with recompute, forward again, `epochs` times."""
    passes = work.epochs * (4 if work.recompute else 3)
    return passes * read_seconds(shape, work.tokens, work.length, machine, share, gpus)


def rows_at_once(work: Work, machine: Machine, tensor_parallel: int, *, reserved: float = 0.0) -> int:
    """Rows of full length whose keys and values fit beside the weights of one engine."""
    room = tensor_parallel * (0.9 * machine.memory - reserved) - WEIGHT_BYTES * work.policy.parameters
    return max(1, int(room / (work.policy.cache_bytes * work.length)))


def generate_seconds(work: Work, machine: Machine, shares: Shares, layout: Layout) -> float:
    """Reading the prompts, then one pass a token over weights and caches, in as many waves as have room.

    A pass takes as long as its bytes or its operations, whichever is longer; with tensor parallelism two sums a layer
    are added.
    """
    engines = max(1, layout.num_sampling // layout.tensor_parallel)
    rows = ceil(work.answers / engines)
    waves = ceil(rows / rows_at_once(work, machine, layout.tensor_parallel))
    rows_a_wave = rows / waves
    context = work.prompt_tokens + work.answer_tokens / 2
    read = WEIGHT_BYTES * work.policy.parameters + rows_a_wave * context * work.policy.cache_bytes
    by_bytes = read / (layout.tensor_parallel * machine.bandwidth * shares.decode)
    by_operations = read_seconds(
        work.policy, rows_a_wave, int(2 * context), machine, shares.read, layout.tensor_parallel
    )
    summed = 2 * work.policy.layers * rows_a_wave * work.policy.width * WEIGHT_BYTES
    links = all_reduce_seconds(summed, layout.tensor_parallel, machine, shares.links)
    prefill = read_seconds(
        work.policy, rows * work.prompt_tokens, work.prompt_tokens, machine, shares.read, layout.tensor_parallel
    )
    return prefill + waves * work.answer_tokens * (max(by_bytes, by_operations) + links + shares.token_s)


def all_reduce_seconds(size: float, gpus: int, machine: Machine, share: float) -> float:
    """A sum of `size` bytes over all GPUs: within machines by NVLink, then between them, each GPU with its part.

    >>> machine = Machine(flops=1, bandwidth=1, memory=1, nvlink=100, network=10, gpus=2)
    >>> all_reduce_seconds(1000, 2, machine, 1.0), all_reduce_seconds(1000, 4, machine, 1.0)
    (10.0, 60.0)
    """
    inside = min(gpus, machine.gpus)
    machines = ceil(gpus / machine.gpus)
    seconds = 2 * (inside - 1) / inside * size / (machine.nvlink * share)
    if machines > 1:
        seconds += 2 * (machines - 1) / machines * (size / inside) / (machine.network * share)
    return seconds


def all_gather_seconds(size: float, gpus: int, machine: Machine, share: float) -> float:
    """`size` bytes that lie in parts on all GPUs, whole on each of them: through the slowest link on the way.

    >>> machine = Machine(flops=1, bandwidth=1, memory=1, nvlink=100, network=10, gpus=2)
    >>> all_gather_seconds(1000, 2, machine, 1.0), all_gather_seconds(1000, 4, machine, 1.0)
    (5.0, 37.5)
    """
    link = machine.nvlink if gpus <= machine.gpus else min(machine.nvlink, machine.gpus * machine.network)
    return (gpus - 1) / gpus * size / (link * share)


def exchange_seconds(work: Work, shape: Shape, machine: Machine, shares: Shares, layout: Layout) -> tuple[float, float]:
    """What learners tell each other in one step: seconds that nothing hides, and seconds that hide behind computing.

    replicate: all gradients once an update, after the last micro-batch. shard: the weights of a layer before it is
    used, forward and backward, and its gradients after, for each micro-batch, while other layers are computed. hsdp:
    the same within machines, and gradients of a part between them.
    """
    gpus, updates = layout.num_learning, work.epochs * work.updates
    gradients = GRADIENT_BYTES * shape.parameters
    if layout.weights == "replicate":
        return updates * all_reduce_seconds(gradients, gpus, machine, shares.links), 0.0
    inside = gpus if layout.weights == "shard" else min(gpus, machine.gpus)
    passes = max(updates, ceil(work.epochs * work.tokens / gpus / work.row_tokens_at_once))
    moved = 2 * WEIGHT_BYTES * shape.parameters + gradients
    hidden = passes * all_gather_seconds(moved, inside, machine, shares.links)
    machines = ceil(gpus / machine.gpus)
    if layout.weights == "shard" or machines == 1:
        return 0.0, hidden
    between = 2 * (machines - 1) / machines * (gradients / inside) / (machine.network * shares.links)
    return updates * between, hidden


def sync_seconds(work: Work, machine: Machine, shares: Shares, layout: Layout) -> float:
    """New weights to the engines: a copy on the same GPUs, or over the links to others."""
    size = WEIGHT_BYTES * work.policy.parameters
    if layout.engines == "shared":
        return size / layout.tensor_parallel / machine.bandwidth
    link = machine.nvlink if layout.gpus <= machine.gpus else machine.network
    return size / layout.tensor_parallel / (link * shares.links)


def learner_bytes(work: Work, machine: Machine, layout: Layout) -> float:
    """Of one GPU that learns: states of the learners, weights of those that only read, activations.

    Sharded weights are divided by the GPUs that share them, but for the layer at work.
    """
    parts = {
        "replicate": 1,
        "shard": layout.num_learning,
        "hsdp": min(layout.num_learning, machine.gpus),
    }[layout.weights]
    copy = WEIGHT_BYTES if parts == 1 else 0  # sharded masters are cast a layer at a time
    states = (STATE_BYTES + copy) * sum(shape.parameters for shape in work.learners)
    held = WEIGHT_BYTES * sum(shape.parameters for shape in work.frozen)
    largest = max(work.learners, key=lambda shape: shape.parameters)
    layer = 2 * WEIGHT_BYTES * largest.parameters / largest.layers if parts > 1 else 0.0
    return (states + held) / parts + layer + activation_bytes(work, largest)


def activation_bytes(work: Work, shape: Shape) -> float:
    """Of one micro-batch: the input of every layer and all of one, or all of all without recompute."""
    tokens = max(work.length, min(work.row_tokens_at_once, work.tokens))
    inner = _LAYER_BYTES * tokens * shape.width
    return inner + 2 * tokens * shape.width * shape.layers if work.recompute else inner * shape.layers


def sampler_bytes(work: Work, machine: Machine, layout: Layout) -> float:
    """Of one GPU that samples: weights, and caches of the rows that it holds at once."""
    engines = max(1, layout.num_sampling // layout.tensor_parallel)
    rows = min(ceil(work.answers / engines), rows_at_once(work, machine, layout.tensor_parallel))
    caches = rows * work.length * work.policy.cache_bytes
    return (WEIGHT_BYTES * work.policy.parameters + caches) / layout.tensor_parallel


def step(work: Work, machine: Machine, shares: Shares, layout: Layout) -> Step:
    """One step of a layout. With `lag` 0 sampling and learning take turns; from 1 on the longer one sets the pace."""
    _refuse_impossible(layout)
    generate = generate_seconds(work, machine, shares, layout)
    gpus = layout.num_learning
    judge = sum(read_seconds(shape, work.tokens, work.length, machine, shares.read, gpus) for shape in work.readers)
    learn = 0.0
    for shape in work.learners:
        computing = learn_seconds(work, shape, machine, shares.learn, gpus)
        bare, hidden = exchange_seconds(work, shape, machine, shares, layout)
        learn += max(computing, hidden) + bare
    sync = sync_seconds(work, machine, shares, layout)
    sampling, learning = generate + sync, judge + learn
    seconds = max(sampling, learning) if layout.lag else sampling + learning
    busy = layout.num_sampling * generate + layout.num_learning * learning
    memory = max(learner_bytes(work, machine, layout), sampler_bytes(work, machine, layout))
    return Step(
        generate=generate,
        judge=judge,
        learn=learn,
        sync=sync,
        seconds=seconds,
        idle=1 - busy / (layout.gpus * seconds),
        memory=memory,
    )


def _refuse_impossible(layout: Layout) -> None:
    if layout.lag and layout.engines == "shared":
        raise ValueError("GPUs that sample and learn in turn cannot do both at once: lag needs separate engines")
    if layout.num_learning < 1 or layout.num_sampling < layout.tensor_parallel:
        raise ValueError(
            f"{layout.gpus} GPUs with {layout.num_sampling} that sample, {layout.tensor_parallel} an engine, leave "
            f"{layout.num_learning} to learn"
        )
