"""What a recipe asks of groups of processes: whether they can hold what its RL stages need, and their layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kedge.commands.checks.machine import gpus_of, learning_weight_bytes, role_rows
from kedge.commands.checks.sharding import stage_findings
from kedge.core.files import readable_bytes
from kedge.core.findings import Finding, refuse_fatal
from kedge.core.plugin_sections import kind_of
from kedge.core.settings import Section
from kedge.recipe.placement import MOST_ON_CPU, ROLES, roles_of, weights_of

if TYPE_CHECKING:
    from kedge.models.loading.describe import ModelFacts
    from kedge.recipe.schema import Recipe
    from kedge.runtime.worker import GroupLayout

_RL: Final = ("ppo", "group")
"""Kinds of stages whose roles live in groups; all others run in the driver's process."""
_SHARING: Final = ("policy", "reference", "critic", "generator")
_ROWS: Final = {"actor": "policy", "base": "policy"}
"""Rows of the memory table by the role whose group holds them, where that has another name."""


def layout_of(recipe: Recipe) -> list[GroupLayout]:
    """The groups of a recipe; none where it does not ask for any."""
    from kedge.runtime.worker import GroupLayout  # torch

    placement = recipe.settings.placement
    roles, weights = roles_of(placement), weights_of(placement)
    return [
        GroupLayout(
            name=name,
            roles=roles[name],
            size=group.gpus,
            weights=weights[name],
            shard_within=placement.shard_within,
        )
        for name, group in (placement.groups or {}).items()
    ]


def refuse_groups(recipe: Recipe) -> None:
    """Raise with all that keeps the groups of a recipe from running."""
    refuse_fatal(group_findings(recipe), f"{recipe.file}: its groups cannot run, and nothing was started")


def refuse_layout(recipe: Recipe, *, undone: str) -> None:
    """The same of what is so on every machine."""
    refuse_fatal(layout_findings(recipe), f"{recipe.file}: its groups cannot run, and nothing was {undone}")


def group_findings(recipe: Recipe) -> Iterator[Finding]:
    """What keeps the groups of a recipe from running here."""
    placement = recipe.settings.placement
    if placement.groups is None:
        return
    from kedge.runtime.ray_groups import cluster_lacks, missing_ray

    if (problem := missing_ray()) is not None:
        yield Finding(level="fatal", code="machine.ray", message=problem, where="placement.groups")
    total = sum(group.gpus for group in placement.groups.values())
    num_gpus = gpus_of(recipe.settings.device)
    lacks = None
    if problem is None:
        lacks = cluster_lacks(total, device=recipe.settings.device, num_gpus=num_gpus, most_on_cpu=MOST_ON_CPU)
    if lacks is not None:
        yield Finding(
            level="fatal",
            code="machine.groups",
            message=lacks,
            where="placement.groups",
            fix="give the groups fewer gpus, or join a larger cluster (RAY_ADDRESS)",
        )
    yield from layout_findings(recipe)


def layout_findings(recipe: Recipe) -> Iterator[Finding]:
    """What groups cannot do for the stages of a recipe, on whatever machine."""
    placement = recipe.settings.placement
    if placement.groups is None:
        return
    homes = {role: name for name, roles in roles_of(placement).items() for role in roles}
    stages = {name: stage for name, stage in recipe.stages.items() if kind_of(stage) in _RL}
    cut = [name for name, weights in weights_of(placement).items() if weights == "shard"]
    # Groups that only read may have more processes than a step has rows.
    learners = {homes["policy"], homes["critic"]}
    learning = max((placement.groups[name].gpus for name in cut if name in learners), default=1)
    for name, settings in stages.items():
        yield from _stage_findings(name, settings, homes)
        yield from stage_findings(f"stages.{name}", settings, learning) if cut else ()
    if not stages:
        yield Finding(
            level="warning",
            code="groups.unused",
            message="groups hold the roles of the stages ppo and group, and this recipe has none of them",
            where="placement.groups",
        )


def _stage_findings(name: str, settings: Section, homes: Mapping[str, str]) -> Iterator[Finding]:
    values: Any = settings
    roles = [role for role in _SHARING if role != "critic" or hasattr(values, "critic")]
    apart = sorted({homes[role] for role in roles})
    if values.roles != "separate" and len(apart) > 1:
        where = ", ".join(f"{role} in {homes[role]}" for role in roles)
        yield Finding(
            level="fatal",
            code="groups.sharing",
            message=f"roles: {values.roles} shares weights between {', '.join(roles)}, and the groups are {where}: "
            "what is shared cannot be apart",
            where=f"stages.{name}.roles",
            fix="set roles: separate, or leave these roles in one group (the reward may be apart)",
        )
    generator = values.generator
    if kind_of(generator) == "vllm" and not generator.servers:
        yield Finding(
            level="fatal",
            code="groups.vllm",
            message="vLLM beside groups is asked on servers that run already (generator.servers): Kedge does not know "
            "which GPUs of a cluster are free for it",
            where=f"stages.{name}.generator",
            fix="start vLLM by its own command (docs/vllm.md) and give its address as generator.servers",
        )
    elif kind_of(generator) != "local" and homes["generator"] != homes["policy"]:
        yield Finding(
            level="fatal",
            code="groups.generator",
            message=f"generator: {kind_of(generator)} samples elsewhere already; a group of its own "
            f"({homes['generator']}) is for generator: local",
            where="placement.groups",
            fix="leave the role generator where the policy is",
        )
    for field in ("reward", "gold"):
        yield from _callable_findings(getattr(values, field), f"stages.{name}.{field}")


def _callable_findings(source: Any, where: str) -> Iterator[Finding]:
    """A function that a script handed over must be one that other processes can import."""
    if kind_of(source) == "mix":
        for part, inner in source.parts.items():
            yield from _callable_findings(inner, f"{where}.parts.{part}")
    elif kind_of(source) == "callable" and not source.importable:
        yield Finding(
            level="fatal",
            code="groups.callable",
            message=f"{source.name} cannot be imported by another process: it is a lambda, inside of another function, "
            "or of the script itself",
            where=where,
            fix="put the function into a module that can be imported, or into a file: {kind: function, path: "
            '"file.py:name"}',
        )


def group_lines(recipe: Recipe, facts: Mapping[str, ModelFacts], reward_members: Mapping[str, int]) -> Iterator[str]:
    """The layout: which group holds which roles on how many processes, and about how many bytes that takes.

    `facts` and `reward_members` are by stage.
    """
    placement = recipe.settings.placement
    if placement.groups is None:
        return
    homes = {role: name for name, roles in roles_of(placement).items() for role in roles}
    on_gpu = bool(gpus_of(recipe.settings.device))
    unit = "GPU" if on_gpu else "process"
    for name, settings in recipe.stages.items():
        values: Any = settings
        if kind_of(settings) not in _RL:
            yield f"{name}: in the driver's process, without groups"
            continue
        absent = {"critic"} - ({"critic"} if hasattr(values, "critic") else set[str]())
        absent |= set[str]() if values.gold else {"gold"}
        members = reward_members.get(name, 0)
        rows = role_rows(values, facts[name], members, on_gpu=on_gpu) if name in facts else []
        for group, size in ((group, section.gpus) for group, section in placement.groups.items()):
            roles = [role for role in ROLES if homes[role] == group and role not in absent]
            held = [row for row in rows if homes[_ROWS.get(row.role, row.role)] == group]
            if not roles:
                continue
            about = f", about {readable_bytes(sum(row.own_bytes + row.learning_bytes for row in held))} each"
            count = f"{size} {unit}" + ("" if size == 1 else "s" if unit == "GPU" else "es")
            yield f"{name}: group {group} on {count} holds {', '.join(roles)}{about if held else ''}"
        if homes["generator"] != homes["policy"] and name in facts:
            sent = readable_bytes(learning_weight_bytes(values, facts[name]))
            yield f"{name}: {sent} of weights go from group {homes['policy']} to {homes['generator']} an iteration"
