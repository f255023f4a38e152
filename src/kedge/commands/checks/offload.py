"""What a stage moves to the host's memory, about how much that is, and what this machine cannot round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kedge.commands.checks.machine import learning_weights, role_rows
from kedge.core.errors import ModelError
from kedge.core.files import readable_bytes
from kedge.core.findings import Finding

if TYPE_CHECKING:
    from kedge.models.loading.describe import ModelFacts
    from kedge.recipe.schema import Recipe

_STATE_BYTES = 12
"""Of a weight that learns in bfloat16: its float32 copy and two moments."""


def offload_lines(values: Any, facts: ModelFacts, *, reward_members: int, on_gpu: bool) -> Iterator[str]:
    """A line for each thing that is moved, with what the GPU has more room for in between."""
    names: tuple[str, ...] = getattr(getattr(values, "memory", None), "offload", ())
    if names and not on_gpu:
        yield f"memory.offload ({', '.join(names)}) does nothing on a CPU: there is no other memory"
        return
    rows = {row.role: row for row in role_rows(values, facts, reward_members, on_gpu=True)}
    for name in names:
        if name == "optimiser":
            saved = readable_bytes(learning_weights(values, facts) * _STATE_BYTES)
            yield f"optimiser: about {saved} of moments and float32 copies in the host's memory between updates"
        elif name in rows:
            held = rows[name].host_bytes // (2 if values.memory.frozen_bits == 16 else 1)  # bfloat16 on a GPU
            yield f"{name}: about {readable_bytes(held)} in the host's memory between its turns"
        else:
            yield f"{name}: in the host's memory between its turns"


def bits_findings(recipe: Recipe) -> Iterator[Finding]:
    """A fatal finding where this machine cannot compute with frozen models, or a base, of so few bits."""
    for name, settings in recipe.stages.items():
        for path, bits in few_bits(settings):
            from kedge.models.loading.load import refuse_bits  # torch
            from kedge.stages.shared.device import pick_device

            try:
                refuse_bits(bits, pick_device(recipe.settings.device))
            except ModelError as error:
                where = f"stages.{name}.{path}"
                yield Finding(level="fatal", code="machine.bits", message=str(error), where=where)


def few_bits(settings: Any) -> Iterator[tuple[str, Any]]:
    """Where a stage asks for frozen weights of fewer than 16 bits, and for how many."""
    memory = getattr(settings, "memory", None)
    lora_of_roles = getattr(memory, "lora", None) if getattr(settings, "roles", None) == "lora" else None
    asked = {
        "memory.frozen_bits": getattr(memory, "frozen_bits", 16),
        "memory.lora.base_bits": getattr(lora_of_roles, "base_bits", 16),
        "lora.base_bits": getattr(getattr(settings, "lora", None), "base_bits", 16),
    }
    yield from ((path, bits) for path, bits in asked.items() if bits != 16)
