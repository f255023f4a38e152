"""Memory of a stage by role: weights, gradients, optimiser, activations, cache, logits. Closed formulas, bytes.

A GPU computes in bfloat16 with a float32 stream and float32 masters; a CPU in float32, where a weight is its own
master. What is counted is what torch has allocated at its peak, as the event `run.memory` of a run says it: while
CUDA graphs replay, their activations are not counted a second time, but they are while they are captured.
Left out: the allocator's own rounding, other processes on the card, optimisers other than AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from kedge.plan.holding import Holding
from kedge.plan.machines import Kind, Machine
from kedge.plan.passes import PassPlan, halved, is_captured, plan_passes, trial_pass
from kedge.plan.shapes import ModelShape
from kedge.plan.tensors import (
    KEPT_SHARE,
    MASTER,
    NARROW,
    TILE_TOKENS,
    activation_bytes,
    cache_bytes,
    forward_bytes,
    frozen_bytes,
    logit_bytes,
    one_layer_bytes,
    weight_bytes,
)
from kedge.plan.work import Sampling, StageWork

READ_TOKENS: Final[dict[Kind, int]] = {"cuda": 65_536, "cpu": 8_192}
"""Tokens at once without gradients."""
COLUMNS: Final = 128
"""The cache of a GPU has a multiple of so many columns."""
MOST_ROWS: Final[dict[Kind, int]] = {"cuda": 1024, "cpu": 64}
CACHE_SHARE: Final = 0.5
"""Of the free memory, that the cache of `auto` rows may take."""
OFFLOAD_BUCKET: Final = 2**28
"""Of an optimiser in host memory: what is on the GPU at a time."""
USABLE: Final = 0.95
"""Of a machine's memory: the rest is the allocator's rounding, kernels and the driver."""
PROCESS: Final[dict[Kind, int]] = {"cuda": 0, "cpu": 480 * 2**20}
"""Resident before any weight: Python, torch and transformers, measured. On a GPU torch's own share is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """The memory of one role."""

    role: str
    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    """Moments, float32 masters of weights in bfloat16, and a moving average of them."""
    activations: int = 0
    cache: int = 0
    logits: int = 0

    @property
    def standing(self) -> int:
        """What is held whatever is being computed."""
        return self.weights + self.optimiser + self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory of a stage: of its roles, and of the moment at which most is held."""

    roles: tuple[RoleBytes, ...]
    peak: int
    fits: bool
    """Whether the machine has room, with passes as small as they have to be made."""
    at: Literal["learning", "reading", "sampling"]
    """What is being done at the peak."""
    passes: PassPlan | None


def sampled_rows(sampling: Sampling, shape: ModelShape, machine: Machine, free: float) -> tuple[int, int]:
    """Answers that are drawn at once, and the columns of their cache."""
    longest = sampling.longest_prompt + sampling.new_tokens
    columns = -(-longest // COLUMNS) * COLUMNS if machine.kind == "cuda" else longest
    total = -(-sampling.answers // machine.gpus)
    if sampling.rows != "auto":
        return min(sampling.rows, total), columns
    room = int(CACHE_SHARE * max(free, 0.0)) // max(1, longest * cache_bytes(shape, machine.kind))
    fitting = room if machine.kind == "cuda" else MOST_ROWS["cpu"]
    return max(1, min(fitting, MOST_ROWS[machine.kind], total)), columns


def stage_memory(
    work: StageWork, machine: Machine, *, pass_tokens: int | None = None, tried_tokens: int | None = None
) -> StageMemory:
    """The memory of a stage on this machine. `pass_tokens` is the size of passes where it was measured, and
    `tried_tokens` that of the largest trial before."""
    if work.holding is None:
        return _sampling_memory(work, machine)
    standing = _standing(work, work.holding, machine)
    if work.sampling is not None:
        standing = _with_cache(work, standing, machine)
    held = PROCESS[machine.kind] + sum(role.standing for role in standing)
    room = USABLE * machine.memory - held
    passes = _passes(work, work.holding, machine, room, pass_tokens, tried_tokens)
    learning = _learning(work, work.holding, machine, standing, passes)
    while _moment(learning) > room and (smaller := halved(work.looked, passes)) is not None:
        passes = smaller
        learning = _learning(work, work.holding, machine, standing, passes)
    trial = trial_pass(work.looked, passes)
    trying = 0 if trial is None else _moment(_learning(work, work.holding, machine, standing, trial))
    judging = _on_turn(work, work.holding, machine)
    reading = judging + min(_reading(work, machine), max(room - judging, 0.0))  # halved as well
    moment = _moment(learning)
    most = max(moment, reading, trying if trying <= room else 0)  # a trial that does not fit is given up
    return StageMemory(
        roles=tuple(learning),
        peak=int(held + most),
        fits=max(moment, judging) <= room,
        at="learning" if most in (moment, trying) else "reading",
        passes=passes,
    )


def learning_weights(work: StageWork, holding: Holding, role: str) -> int:
    """How many weights of a role learn."""
    shape = work.shape
    if holding.roles == "lora":
        return shape.adapters(holding.rank, holding.targets)
    if holding.roles == "trunk":
        head = 0 if shape.is_tied or role == "critic" else shape.embedding
        return shape.top(_top_layers(shape, holding)) + head
    whole = shape.scoring if role == "critic" or work.family == "reward" else shape.parameters
    frozen = work.shape.layers - work.layers
    return whole - (frozen * shape.layer_weights + shape.embedding if frozen else 0)


def _top_layers(shape: ModelShape, holding: Holding) -> int:
    return shape.layers - (holding.trunk_layers or max(1, shape.layers // 2))


def _learning_layers(work: StageWork, holding: Holding) -> int:
    return _top_layers(work.shape, holding) if holding.roles == "trunk" else work.layers


def _standing(work: StageWork, holding: Holding, machine: Machine) -> list[RoleBytes]:
    """The roles with what they hold all the time: weights, moments, masters."""
    shape, kind = work.shape, machine.kind
    roles: list[RoleBytes] = []
    if holding.roles == "lora":
        whole = shape.scoring if work.family == "reward" else shape.parameters
        base = frozen_bytes(shape, whole, holding.base_bits, kind)
        roles.append(RoleBytes(role="base", weights=_part(base, holding)))
    if holding.roles == "trunk":
        shared = shape.parameters - shape.top(_top_layers(shape, holding))
        roles.append(RoleBytes(role="trunk", weights=shared * weight_bytes(kind)))
    for role in work.learners:
        roles.append(_learner(work, holding, machine, role))
    roles += _frozen_roles(work, holding, machine)
    return roles


def _learner(work: StageWork, holding: Holding, machine: Machine, role: str) -> RoleBytes:
    """Of a role that learns, all its members: those that wait hold weights and masters."""
    weights = learning_weights(work, holding, role)
    held = weights
    if holding.roles in ("full", "separate"):
        scores = role == "critic" or work.family == "reward"
        held = work.shape.scoring if scores else work.shape.parameters
    is_narrow = machine.kind == "cuda" and holding.shards == 1
    masters = MASTER * weights if machine.kind == "cuda" else 0
    own = held * (NARROW if is_narrow else MASTER if machine.kind == "cpu" else 0)
    moments = holding.moment_bytes * weights
    gathered = 0
    if holding.shards > 1 and machine.kind == "cuda":
        gathered = NARROW * (2 * work.shape.layer_weights + work.shape.embedding)
    average = MASTER * weights if work.has_average and role == "policy" else 0
    optimiser = work.members * masters + moments + average
    if "optimiser" in holding.offload and machine.kind == "cuda":
        optimiser = min(optimiser, OFFLOAD_BUCKET)
    return RoleBytes(
        role=role,
        weights=_part(work.members * own, holding) + gathered,
        optimiser=_part(optimiser, holding),
    )


def _frozen_roles(work: StageWork, holding: Holding, machine: Machine) -> list[RoleBytes]:
    """Those that only read, with what of them is on the device while others learn."""
    return [
        RoleBytes(role=role, weights=0 if _waits(role, holding, machine) else _part(size, holding))
        for role, size in frozen_sizes(work, holding, machine)
    ]


def frozen_sizes(work: StageWork, holding: Holding, machine: Machine) -> list[tuple[str, int]]:
    """The weights of the roles that only read, in bytes."""
    shape, kind = work.shape, machine.kind
    sizes: list[tuple[str, int]] = []
    if work.reference:
        own = {
            "lora": 0,
            "trunk": shape.top(_top_layers(shape, holding)) * weight_bytes(kind),
        }.get(holding.roles, frozen_bytes(shape, shape.parameters, holding.frozen_bits, kind))
        sizes.append(("reference", own))
    if work.rewards:
        scoring = work.reward_shape or shape
        whole = frozen_bytes(scoring, scoring.scoring, holding.frozen_bits, kind)
        if holding.roles in work.shared_reward:
            whole = {
                "lora": shape.adapters(holding.rank, holding.targets) * weight_bytes(kind),
                "trunk": shape.top(_top_layers(shape, holding)) * weight_bytes(kind),
            }.get(holding.roles, whole)
        sizes.append(("reward", work.rewards * whole))
    return sizes


def _waits(role: str, holding: Holding, machine: Machine) -> bool:
    """Whether a frozen role is in host memory until its turn."""
    return role in holding.offload and machine.kind == "cuda"


def _part(size: int, holding: Holding) -> int:
    """A process's part of what is sharded.

    >>> _part(100, Holding(roles="full", shards=4)), _part(100, Holding(roles="full"))
    (25, 100)
    """
    return -(-size // holding.shards)


def _with_cache(work: StageWork, roles: list[RoleBytes], machine: Machine) -> list[RoleBytes]:
    """With the cache of the generator, which a GPU keeps while the policy learns, and a whole copy where weights are
    sharded."""
    assert work.sampling is not None
    assert work.holding is not None
    if machine.kind == "cpu":
        return roles
    copy = NARROW * work.shape.parameters if work.holding.shards > 1 else 0
    free = machine.memory - sum(role.standing for role in roles) - copy
    rows, columns = sampled_rows(work.sampling, work.shape, machine, free)
    cache = rows * columns * cache_bytes(work.shape, machine.kind)
    return [*roles, RoleBytes(role="generator", weights=copy, cache=cache)]


def _passes(
    work: StageWork,
    holding: Holding,
    machine: Machine,
    room: float,
    pass_tokens: int | None,
    tried_tokens: int | None,
) -> PassPlan:
    layers = _learning_layers(work, holding)
    token_bytes = (
        activation_bytes(
            work.shape,
            1024,
            layers=layers,
            kind=machine.kind,
            recompute=holding.recompute,
            is_frozen=holding.roles == "lora",
        )
        / 1024
    )
    steps = [item for step in work.looked for item in step]
    share = sum(row.counted for item in steps for row in item) / sum(row.tokens for item in steps for row in item)
    logits = 6 * work.shape.vocabulary * share if work.has_logits else 0.0
    gradients = MASTER * sum(learning_weights(work, holding, role) for role in work.learners[:1]) / holding.shards
    return plan_passes(
        work.looked,
        micro_batch=work.micro_batch,
        is_gpu=machine.kind == "cuda",
        layer_weights=layers * work.shape.layer_weights,
        room=room - gradients,
        token_bytes=token_bytes + logits,
        shares=machine.gpus,
        measured=pass_tokens,
        tried=tried_tokens,
    )


def _learning(
    work: StageWork, holding: Holding, machine: Machine, roles: list[RoleBytes], passes: PassPlan
) -> list[RoleBytes]:
    """The roles with what they hold at the start of a backward pass."""
    layers = _learning_layers(work, holding)
    in_graphs = (
        machine.kind == "cuda"
        and work.is_compiled
        and not holding.recompute
        and holding.shards == 1
        and is_captured(passes.largest, max(layers - 1, 0) * work.shape.layer_weights)
    )
    activations = activation_bytes(
        work.shape,
        passes.largest,
        layers=layers,
        kind=machine.kind,
        recompute=holding.recompute,
        is_frozen=holding.roles == "lora",
        captured=in_graphs,
    )
    logits = logit_bytes(work.shape, passes.counted, machine=machine) if work.has_logits else 0
    without_logits = _without_logits(work, holding, machine, passes, activations if in_graphs else 0)
    learning: list[RoleBytes] = []
    for role in roles:
        if role.role not in work.learners:
            learning.append(role)
            continue
        weights = learning_weights(work, holding, role.role)
        sums = _gradient_bytes(weights, passes.most_passes, machine.kind, captured=in_graphs)
        own = 0 if role.role == "critic" or not work.has_logits else logits
        learning.append(
            replace(
                role,
                gradients=_part(sums, holding),
                activations=activations,
                logits=max(0, own - without_logits),
            )
        )
    if holding.roles == "trunk":
        width = 4 if machine.kind == "cuda" else MASTER
        cached = work.batch_tokens * work.shape.width * width
        learning = [replace(role, cache=cached) if role.role == "trunk" else role for role in learning]
    return learning


def _without_logits(work: StageWork, holding: Holding, machine: Machine, passes: PassPlan, captured: int) -> int:
    """Of the activations, those that are there only when logits are not: those of graphs while they are `captured`, and
    of a layer that is computed again, which begins when the logits are gone."""
    if not holding.recompute:
        return captured
    return passes.largest * one_layer_bytes(work.shape, machine.kind, is_frozen=holding.roles == "lora")


def _gradient_bytes(weights: int, passes: int, kind: Kind, *, captured: bool) -> int:
    """Sums of the gradients of earlier passes, and the block that a graph writes to: bfloat16 on a GPU, and float32
    from the third pass on.

    >>> _gradient_bytes(10, 1, "cuda", captured=True), _gradient_bytes(10, 3, "cuda", captured=False)
    (20, 60)
    """
    if kind == "cpu":
        return MASTER * weights
    block = NARROW * weights if captured else 0
    sums = {1: NARROW if not captured else 0, 2: NARROW + NARROW}.get(passes, MASTER + NARROW) * weights
    return block + sums


def _moment(roles: list[RoleBytes]) -> int:
    """What is held besides what stands, while the role that takes most learns: its activations and gradients, and what
    the trunk caches."""
    learners = [role for role in roles if role.gradients]
    block = sum(role.gradients for role in learners)
    cached = sum(role.cache for role in roles if role.role == "trunk")
    return block + cached + max((role.activations + role.logits for role in learners), default=0)


def _reading(work: StageWork, machine: Machine) -> int:
    """While answers are judged, or held-out rows are measured, without gradients."""
    tokens = min(READ_TOKENS[machine.kind], work.batch_tokens or _held_out_tokens(work))
    tile = 0
    if work.has_logits and machine.kind == "cuda":
        tile = min(TILE_TOKENS * work.shape.vocabulary * MASTER, machine.memory // KEPT_SHARE)
    return tokens * forward_bytes(work.shape, machine.kind) + tile


def _on_turn(work: StageWork, holding: Holding, machine: Machine) -> int:
    """What comes from the host while answers are judged: the larger one of the frozen roles that wait there, as each
    comes for its turn alone."""
    return max(
        (size for role, size in frozen_sizes(work, holding, machine) if _waits(role, holding, machine)), default=0
    )


def _held_out_tokens(work: StageWork) -> int:
    return 2 * max((sum(row.tokens for item in step for row in item) for step in work.looked), default=0)


def _sampling_memory(work: StageWork, machine: Machine) -> StageMemory:
    """A stage that learns nothing: weights, cache, and the reading of prompts."""
    if work.sampling is None:
        return StageMemory(roles=(), peak=0, fits=True, at="reading", passes=None)
    shape, kind = work.shape, machine.kind
    weights = shape.parameters * weight_bytes(kind)
    rows, columns = sampled_rows(work.sampling, shape, machine, machine.memory - weights)
    cache = rows * columns * cache_bytes(shape, kind)
    prompts = int(rows * work.sampling.prompt_tokens) * forward_bytes(shape, kind)
    role = RoleBytes(role="model", weights=weights, cache=cache, activations=prompts)
    peak = PROCESS[kind] + weights + cache + prompts
    return StageMemory(roles=(role,), peak=peak, fits=peak <= USABLE * machine.memory, at="sampling", passes=None)
