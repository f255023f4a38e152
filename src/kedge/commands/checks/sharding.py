"""What sharded weights (`placement.weights: shard`) cannot do, found before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kedge.core.findings import Finding, refuse_fatal

if TYPE_CHECKING:
    from kedge.recipe.schema import Recipe


def refuse_unsharded(recipe: Recipe, processes: int, *, undone: str = "started") -> None:
    """Raise with all that keeps weights from being sharded over so many processes: also where a run goes on, for its
    placement may have changed."""
    refuse_fatal(
        shard_findings(recipe, processes),
        f"{recipe.file}: its weights cannot be sharded (placement.weights), and nothing was {undone}",
    )


def shard_findings(recipe: Recipe, processes: int) -> Iterator[Finding]:
    """A fatal finding for each setting of a stage that learns which does not go with sharded weights. Stages in groups
    are looked at by `groups`; the others of such a recipe run in the driver's process, which holds all."""
    placement = recipe.settings.placement
    if placement.weights != "shard" or placement.groups is not None:
        return
    for name, settings in recipe.stages.items():
        values: Any = settings
        if hasattr(values, "micro_batch"):
            yield from stage_findings(f"stages.{name}", values, processes)


def stage_findings(where: str, values: Any, processes: int) -> Iterator[Finding]:
    roles = getattr(values, "roles", None)
    if roles == "trunk":
        yield _refused(
            f"{where}.roles",
            "roles: trunk keeps hidden states of rows in each process, which sharded weights do not allow",
            "use roles: lora or separate, or placement.weights: replicate",
        )
    lora = values.memory.lora if roles == "lora" else getattr(values, "lora", None)
    if lora is not None and lora.base_bits != 16:
        yield _refused(
            f"{where}.{'memory.' if roles else ''}lora.base_bits",
            f"a base of {lora.base_bits} bits cannot be sharded",
            "set base_bits: 16, of which each process holds a part, or placement.weights: replicate",
        )
    if values.memory.offload:
        yield _refused(
            f"{where}.memory.offload",
            "sharded weights are not moved to the host",
            "leave it out: each process holds a part of them already; or placement.weights: replicate",
        )
    if getattr(values.memory, "frozen_bits", 16) != 16:
        yield _refused(
            f"{where}.memory.frozen_bits",
            f"frozen models of {values.memory.frozen_bits} bits cannot be sharded",
            "set frozen_bits: 16, of which each process holds a part, or placement.weights: replicate",
        )
    for field in ("optimiser", "actor", "critic"):
        if getattr(getattr(values, field, None), "name", None) == "adamw_8bit":
            yield _refused(
                f"{where}.{field}.name",
                "moments in 8 bits are kept in blocks that cannot be cut by the rows of a weight",
                "set name: adamw, whose moments are sharded, or placement.weights: replicate",
            )
    rows = max(values.batch * getattr(values, "answers", 1) // getattr(values, "minibatches", 1), 1)
    if rows < processes:
        yield _refused(
            f"{where}.batch",
            f"an optimiser step has {rows} row{'' if rows == 1 else 's'}, and {processes} processes share them: with "
            "sharded weights those without a row compute one for nothing",
            f"use at most {rows} processes, a larger batch, or fewer minibatches",
        )


def _refused(where: str, message: str, fix: str) -> Finding:
    return Finding(level="fatal", code="placement.shard", message=message, where=where, fix=fix)
