"""What a recipe asks of the machine: the device, and room on the disk for its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.commands.checks.sharding import shard_findings
from kedge.core.files import free_bytes, readable_bytes
from kedge.core.findings import Finding
from kedge.core.plugin_sections import kind_of
from kedge.core.settings import Section
from kedge.recipe.placement import num_processes, too_many
from kedge.runs.checkpoints import CheckpointSettings

if TYPE_CHECKING:
    from kedge.models.loading.describe import ModelFacts
    from kedge.models.roles.memory import RoleMemory
    from kedge.recipe.schema import Recipe

_WEIGHT_BYTES, _NARROW_BYTES, _ADAM_BYTES = 4, 2, 8
"""A learning weight is kept in float32, with two moments of Adam; a GPU computes with two bytes."""
_VLLM_CPU_HEAD = 32
"""The narrowest attention head that vLLM computes on a CPU."""
_ADAPTED_MATRICES = 7
"""Of a transformer block: queries, keys, values, output, and three of the feed-forward part."""


def device_findings(device: str) -> Iterator[Finding]:
    """A fatal finding where this machine does not have the device that the recipe names."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        yield Finding(
            level="fatal",
            code="machine.device",
            message=f"device is {device}, and torch finds no GPU here",
            where="device",
            fix="set device: cpu or auto, or install a build of torch for your GPU",
        )


def gpus_of(device: str) -> int | None:
    """How many GPUs a recipe with this device has here; None where it computes on the CPU."""
    if device == "cpu":
        return None
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else None


def num_sampling(recipe: Recipe) -> int:
    """The most GPUs that a stage gives to servers of vLLM: they do not learn."""
    return max((generator.num_gpus for _, generator in _started_servers(recipe)), default=0)


def _started_servers(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Stages for which Kedge starts servers of vLLM, and the settings of those."""
    for name, settings in recipe.stages.items():
        generator: Any = getattr(settings, "generator", None)
        if kind_of(generator) == "vllm" and generator.python:
            yield name, generator


def placement_findings(recipe: Recipe) -> Iterator[Finding]:
    """Fatal findings where the recipe asks for more processes than this machine can run, for GPUs to share where it has
    none, or shards what cannot be."""
    processes, num_gpus = recipe.settings.placement.processes, gpus_of(recipe.settings.device)
    for name, generator in _started_servers(recipe):
        if generator.is_shared and num_gpus is None:
            yield Finding(
                level="fatal",
                code="machine.shared",
                message="generator.gpus is shared, and this recipe learns on the CPU here: vLLM sleeps on NVIDIA GPUs "
                "alone",
                where=f"stages.{name}.generator.gpus",
                fix="set gpus: 0 for vLLM on the CPU, or sample with generator: local",
            )
    if processes == "auto":
        yield from shard_findings(recipe, _num_processes(recipe, num_gpus))
        return
    if problem := too_many(processes, num_gpus=num_gpus, num_sampling=num_sampling(recipe)):
        yield Finding(level="fatal", code="machine.processes", message=problem, where="placement.processes")
    yield from shard_findings(recipe, processes)


def _num_processes(recipe: Recipe, num_gpus: int | None) -> int:
    return num_processes(recipe.settings.placement, num_gpus=num_gpus, num_sampling=num_sampling(recipe))


def placement_lines(
    recipe: Recipe, facts: Mapping[str, ModelFacts], reward_members: Mapping[str, int]
) -> Iterator[str]:
    """The layout of several processes: where they are, what each holds and computes, and what they add up.

    `facts` and `reward_members` are by stage.
    """
    num_gpus, processes = gpus_of(recipe.settings.device), recipe.settings.placement.processes
    if recipe.settings.placement.groups is not None:
        return
    if processes == "auto":
        processes = _num_processes(recipe, num_gpus)
    is_sharded = recipe.settings.placement.weights == "shard"
    if processes == 1 and not is_sharded:
        if (num_gpus or 1) - num_sampling(recipe) > 1:
            yield f"one process on cuda:0; torch finds {num_gpus} GPUs here: placement.processes: auto takes them all"
        return
    yield _who_holds_what(processes, on_gpu=bool(num_gpus), is_sharded=is_sharded)
    room = f" of {readable_bytes(_gpu_bytes())}" if num_gpus else ""
    for name, settings in recipe.stages.items():
        values: Any = settings
        if not hasattr(values, "batch"):
            continue
        parts = list(_work(values, processes))
        if name in facts:
            roles = role_rows(values, facts[name], reward_members.get(name, 0), on_gpu=bool(num_gpus))
            held = sum(role.own_bytes + role.learning_bytes for role in roles)
            names = ", ".join(role.role for role in roles) or "all roles"
            added = readable_bytes(learning_weights(values, facts[name]) * _WEIGHT_BYTES)
            if is_sharded:
                held = -(-held // processes)
                names = f"1 of {processes} parts of {names}"
            parts.insert(0, f"each holds {names}" + (f", about {readable_bytes(held)}{room}" if roles else ""))
            if is_sharded and hasattr(values, "sampling"):
                copy = facts[name].parameters * (_NARROW_BYTES if num_gpus else _WEIGHT_BYTES)
                parts.insert(1, f"and a whole copy of the policy to sample from, {readable_bytes(copy)}")
            parts.append(f"{added} of gradients added up a {'pass' if is_sharded else 'step'}")
        if kind_of(getattr(values, "generator", None)) == "vllm":
            shared = ", on the same GPUs, asleep while it is learnt" if values.generator.is_shared else ""
            parts.append(f"vLLM is asked by process 0, for all{shared}")
        yield f"{name}: {'; '.join(parts)}"


def _who_holds_what(processes: int, *, on_gpu: bool, is_sharded: bool) -> str:
    if processes == 1:
        device = "cuda:0" if on_gpu else "the CPU"
        return f"one process on {device} with sharded weights: it holds all parts, and computes as one of several would"
    devices = f"cuda:0 to cuda:{processes - 1}" if on_gpu else "the CPU"
    weights = "a part of every weight that learns or is frozen beside it" if is_sharded else "all weights"
    return f"{processes} processes on {devices}, each with {weights}; process 0 also writes the run folder"


def _work(values: Any, processes: int) -> Iterator[str]:
    """The rows of an iteration and of an optimiser step, and the share of a process."""

    def share(rows: int) -> str:
        return f"about {rows / processes:,.0f} a process" if rows >= processes else "fewer than there are processes"

    answers = values.batch * getattr(values, "answers", 1)
    if hasattr(values, "iterations"):
        yield f"{answers:,} answers an iteration, {share(answers)}"
    rows = max(answers // getattr(values, "minibatches", 1), 1)
    yield f"{rows:,} rows a step, {share(rows)}"


def _gpu_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def disk_bytes(recipe: Recipe, facts: Mapping[str, ModelFacts]) -> int:
    """About what the checkpoints and models of all stages take, at most at once; `facts` by stage."""
    return sum(
        _stage_bytes(settings, facts[name])
        for name, settings in recipe.stages.items()
        if name in facts and isinstance(getattr(settings, "checkpoints", None), CheckpointSettings)
    )


def disk_findings(needed: int, runs: Path) -> Iterator[Finding]:
    """A fatal finding where the disk of the runs' folder has less room than the checkpoints take."""
    free = free_bytes(runs)
    if needed > free:
        yield Finding(
            level="fatal",
            code="machine.disk",
            message=f"checkpoints and models take about {readable_bytes(needed)}, and the disk of {runs} has "
            f"{readable_bytes(free)} free",
            where="checkpoints",
            fix="free some space, choose another place (kedge run --runs), or keep fewer checkpoints "
            "(checkpoints.keep); kedge run --no-check starts all the same",
        )


def generator_findings(settings: Section, facts: ModelFacts) -> Iterator[Finding]:
    """Fatal findings where vLLM is to sample from a model that it or the trainer cannot compute."""
    generator: Any = getattr(settings, "generator", None)
    if kind_of(generator) != "vllm":
        return
    if facts.head_problem:
        yield Finding(
            level="fatal",
            code="vllm.head",
            message=f"vLLM's log-probs could not be compared with the trainer's: {facts.head_problem}",
            where="generator",
            fix="use a model with a plain output head",
        )
    if generator.python and not generator.gpus and (facts.head_dim or _VLLM_CPU_HEAD) < _VLLM_CPU_HEAD:
        yield Finding(
            level="fatal",
            code="vllm.head_dim",
            message=f"{facts.source} has attention heads of {facts.head_dim}, and vLLM on a CPU needs {_VLLM_CPU_HEAD}",
            where="generator",
            fix="sample with generator: local, or with vLLM on a GPU",
        )


def role_lines(settings: Section, facts: ModelFacts, *, reward_members: int, on_gpu: bool = False) -> list[str]:
    """About what the roles of an RL stage take in float32, as a table with its total; empty for other stages.

    The run itself prints what its tensors really take. `reward_members` are those of a reward model that a stage makes;
    `on_gpu`: beside which what is moved has another memory.
    """
    rows = role_rows(settings, facts, reward_members, on_gpu=on_gpu) if hasattr(settings, "roles") else []
    if not rows:
        return []
    from kedge.models.roles.memory import table

    return ["memory of the roles, about:", *(f"  {line}" for line in table(rows))]


def role_rows(values: Any, facts: ModelFacts, reward_members: int, *, on_gpu: bool = False) -> list[RoleMemory]:
    """The roles of a stage, or its one model that learns; none where they share what their weights do not tell, as they
    do under `trunk`. `on_gpu`: beside which what is moved has another memory."""
    roles = getattr(values, "roles", None)
    if roles not in (None, "separate", "lora"):
        return []
    from kedge.models.roles.memory import RoleMemory

    weights, learning = facts.parameters * _WEIGHT_BYTES, learning_weights(values, facts)
    memory = getattr(values, "memory", None)
    moved: frozenset[str] = memory.offloads_on("cuda" if on_gpu else "cpu") if memory else frozenset()
    on_device, on_host = (0, _ADAM_BYTES) if "optimiser" in moved else (_ADAM_BYTES, 0)
    if roles is None:
        adapters = learning * _WEIGHT_BYTES if learning < facts.parameters else 0
        return [
            RoleMemory(
                role="the model that learns",
                shared_bytes=0,
                own_bytes=weights + adapters,
                learning_bytes=learning * (_WEIGHT_BYTES + on_device),
                learns=learning,
                host_bytes=learning * on_host,
            )
        ]
    is_lora = roles == "lora"
    learners = ("actor", "critic") if hasattr(values, "critic") else ("actor",)
    learns = learning // len(learners)
    shared = weights if is_lora else 0

    def row(role: str, *, own: int, learns: int = 0, shared: int = shared) -> RoleMemory:
        learning = learns * (_WEIGHT_BYTES + on_device)
        of_host = own if role in moved else learns * on_host
        own = 0 if role in moved else own
        return RoleMemory(
            role=role, shared_bytes=shared, own_bytes=own, learning_bytes=learning, learns=learns, host_bytes=of_host
        )

    rows = [row("base", own=weights, shared=0)] if is_lora else []
    rows += [row(role, own=learns * _WEIGHT_BYTES if is_lora else weights, learns=learns) for role in learners]
    frozen = frozen_bytes(values, facts)
    rows.append(row("reference", own=0 if is_lora else frozen))
    if reward_members:
        rows.append(row("reward", own=reward_members * frozen, shared=0))
    return rows


def frozen_bytes(values: Any, facts: ModelFacts) -> int:
    """Of the weights of a frozen model of a role's own; embeddings and heads are not rounded."""
    embeddings, bits = facts.vocab_size * facts.hidden_size, values.memory.frozen_bits
    if bits == 16:
        return facts.parameters * _WEIGHT_BYTES
    return (facts.parameters - embeddings) * bits // 8 + embeddings * _WEIGHT_BYTES


def _stage_bytes(settings: Section, facts: ModelFacts) -> int:
    values: Any = settings
    checkpoints: CheckpointSettings = values.checkpoints
    learning = learning_weights(values, facts)
    # Those that are kept, the last good or best one, and the one that is being written.
    at_once = checkpoints.keep + 2
    if checkpoints.keep_every and hasattr(values, "iterations"):
        at_once += values.iterations // checkpoints.keep_every
    models = getattr(values, "members", 1) * facts.parameters * _WEIGHT_BYTES
    return at_once * learning * (_WEIGHT_BYTES + _ADAM_BYTES) + models


def learning_weight_bytes(values: Any, facts: ModelFacts) -> int:
    """Of the policy alone."""
    learners = 2 if hasattr(values, "critic") else 1
    return learning_weights(values, facts) // learners * _WEIGHT_BYTES


def learning_weights(values: Any, facts: ModelFacts) -> int:
    """How many weights learn, of policy and critic together."""
    roles = getattr(values, "roles", None)
    lora = values.memory.lora if roles == "lora" else getattr(values, "lora", None) if roles is None else None
    learners = 2 if hasattr(values, "critic") else 1
    if lora is not None:
        adapters = 2 * lora.rank * facts.hidden_size * _ADAPTED_MATRICES * facts.layers
        return learners * min(adapters, facts.parameters)
    return learners * facts.parameters
