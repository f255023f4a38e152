"""How the models of a stage are held in memory: what settings choose, and what memory and time are reckoned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Roles = Literal["full", "separate", "lora", "trunk"]
"""`full` is a stage of one model whose weights all learn; the others are the ways of the RL stages, and `lora` both."""
OFFLOADED: Final = ("optimiser", "reference", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One way of holding the models of a stage."""

    roles: Roles
    rank: int = 16
    targets: tuple[str, ...] = ()
    """Matrices with adapters; empty for all."""
    base_bits: int = 16
    recompute: bool = False
    offload: frozenset[str] = frozenset()
    """Of `OFFLOADED`: what lies in host memory between its turns."""
    frozen_bits: int = 16
    """Of the reference and the reward models under `separate`."""
    shards: int = 1
    """Processes that hold a part of every weight each."""
    trunk_layers: int | None = None
    moment_bytes: int = 8
    """Of a weight: 2 with AdamW in 8 bits."""

    @property
    def is_exact(self) -> bool:
        """Whether the way changes memory and speed alone, beside one with the same roles and bits."""
        return self.base_bits == 16 and self.frozen_bits == 16

    def name(self) -> str:
        """
        >>> Holding(roles="lora", base_bits=4, recompute=True).name()
        'lora, base_bits 4, recompute'
        """
        parts = [
            self.roles,
            *([f"base_bits {self.base_bits}"] if self.base_bits != 16 else []),
            *([f"frozen_bits {self.frozen_bits}"] if self.frozen_bits != 16 else []),
            *(["recompute"] if self.recompute else []),
            *([f"offload {'+'.join(word for word in OFFLOADED if word in self.offload)}"] if self.offload else []),
            *([f"shard {self.shards}"] if self.shards > 1 else []),
        ]
        return ", ".join(parts)


def holding_of(settings: Any, *, shards: int = 1) -> Holding:
    """How a stage's settings say that its models are held; settings that they do not have are as if left out."""
    memory = settings.memory
    roles: str | None = getattr(settings, "roles", None)
    lora = (memory.lora if roles == "lora" else None) if roles else settings.lora
    optimiser = settings.actor if roles else settings.optimiser
    known: Roles = "lora" if lora is not None else "trunk" if roles == "trunk" else "separate" if roles else "full"
    targets = getattr(lora, "targets", "all")
    return Holding(
        roles=known,
        rank=lora.rank if lora is not None else 16,
        targets=() if targets == "all" else tuple(targets),
        base_bits=lora.base_bits if lora is not None else 16,
        recompute=memory.recompute,
        offload=frozenset(getattr(memory, "offload", ())),
        frozen_bits=getattr(memory, "frozen_bits", 16) if known == "separate" else 16,
        shards=shards,
        trunk_layers=getattr(memory, "trunk_layers", None),
        moment_bytes=2 if optimiser.name == "adamw_8bit" else 8,
    )
