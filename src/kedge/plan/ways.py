"""The ways of holding a stage's models that a plan compares, and the settings that choose each.

A setting that this version does not have is known by its name all the same: its row is reckoned, and cannot be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kedge.plan.holding import OFFLOADED, Holding
from kedge.plan.machines import Machine
from kedge.plan.work import StageWork

Changes = Mapping[tuple[str, ...], Any]
"""Settings by their path in the recipe; None takes one out."""


def ways_of(work: StageWork, machine: Machine) -> list[Holding]:
    """The stage's own way first, then the others that this machine can have."""
    assert work.holding is not None
    own = work.holding
    plain = replace(own, roles="full", base_bits=16, frozen_bits=16, recompute=False, offload=frozenset(), shards=1)
    movable = _movable(plain, work)
    found = _rl(plain, movable) if work.family == "rl" else _single(plain, movable)
    can_shard = machine.gpus > 1 and _is_divisible(plain, work, machine.gpus)
    ways = [own, *found, *(_sharded(plain, work, machine.gpus) if can_shard else ())]
    if machine.kind == "cpu":
        ways = [way for way in ways if way == own or (way.is_exact and not way.offload)]
    return list(dict.fromkeys(ways))


def _movable(plain: Holding, work: StageWork) -> frozenset[str]:
    """What can lie in host memory: moments in 8 bits stay where they are, and roles that are not there do not move."""
    there = {"optimiser": plain.moment_bytes == 8, "reference": work.family == "rl", "reward": work.rewards > 0}
    return frozenset(word for word in OFFLOADED if there[word])


def _single(plain: Holding, movable: frozenset[str]) -> Iterator[Holding]:
    moved = movable & {"optimiser"}
    yield from (plain, replace(plain, recompute=True), replace(plain, offload=moved))
    yield replace(plain, recompute=True, offload=moved)
    yield from _adapted(replace(plain, roles="lora"))


def _rl(plain: Holding, moved: frozenset[str]) -> Iterator[Holding]:
    separate = replace(plain, roles="separate")
    yield from (separate, replace(separate, recompute=True))
    yield from (replace(separate, frozen_bits=8), replace(separate, frozen_bits=4), replace(separate, offload=moved))
    yield replace(separate, recompute=True, offload=moved)
    yield from _adapted(replace(plain, roles="lora"))
    trunk = replace(plain, roles="trunk")
    yield from (trunk, replace(trunk, recompute=True))


def _adapted(lora: Holding) -> Iterator[Holding]:
    yield from (lora, replace(lora, recompute=True), replace(lora, base_bits=8), replace(lora, base_bits=4))
    yield replace(lora, base_bits=4, recompute=True)


def _is_divisible(plain: Holding, work: StageWork, gpus: int) -> bool:
    """Whether weights can be sharded: moments in 8 bits are in blocks, and every process needs a row of each step."""
    return plain.moment_bytes == 8 and min(map(len, work.looked), default=0) >= gpus


def _sharded(plain: Holding, work: StageWork, gpus: int) -> Iterator[Holding]:
    whole = replace(plain, roles="separate" if work.family == "rl" else "full", shards=gpus)
    yield from (whole, replace(whole, recompute=True), replace(plain, roles="lora", shards=gpus))


def changes_to(way: Holding, own: Holding, name: str, settings: Any) -> Changes | None:
    """What has to change in the recipe for a stage held as `own` to be held as `way`; None where it cannot be said in
    settings that this version has."""
    stage, memory = ("stages", name), ("stages", name, "memory")
    found: dict[tuple[str, ...], Any] = {}
    is_rl = hasattr(settings, "roles")
    if way.roles != own.roles:
        found |= _roles_change(way, stage, is_rl=is_rl)
    if way.base_bits != own.base_bits and way.roles == "lora":
        found |= {(*(memory if is_rl else stage), "lora", "base_bits"): way.base_bits}
    if way.recompute != own.recompute:
        found[*memory, "recompute"] = way.recompute
    if way.offload != own.offload:
        found[*memory, "offload"] = [word for word in OFFLOADED if word in way.offload] or None
    if way.frozen_bits != own.frozen_bits:
        found[*memory, "frozen_bits"] = way.frozen_bits
    if way.shards != own.shards:
        is_sharded = way.shards > 1
        found[("placement", "weights")] = "shard" if is_sharded else "replicate"
        found |= {("placement", "processes"): way.shards} if is_sharded else {}
    known = set(type(settings.memory).model_fields)
    asked = {path[3] for path in found if path[:3] == memory}
    return found if asked <= known else None


def _roles_change(way: Holding, stage: tuple[str, ...], *, is_rl: bool) -> dict[tuple[str, ...], Any]:
    if is_rl:
        return {(*stage, "roles"): way.roles}
    return {(*stage, "lora"): None} if way.roles == "full" else {(*stage, "lora", "rank"): way.rank}


def merged(parts: Sequence[Changes]) -> Changes:
    """Changes of several stages in one; the last word on placement counts."""
    return {path: value for part in parts for path, value in part.items()}
