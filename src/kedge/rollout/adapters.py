"""LoRA adapters as the kernels read them: of layers that read the same input, one matrix A and one matrix B together.

y = x Wᵀ + scale · (x Aᵀ) Bᵀ, never merged: W stays where the trainer has it, and a change too small to be seen in a
two-byte W + B A counts. A and B are copied, so that any rank and any number of active adapters fill whole blocks; the
copies stay where they are, for graphs remember addresses, and `refresh` brings what the trainer has written since.
Shape letters: M layers that read the same input, Z ranks with zeros up to a whole block, K inputs, N outputs of all M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

_torch: Any = torch
MAX_RANK = 256
"""Of all adapters of a layer together: each program of a kernel multiplies by all of A."""


class LoraLayer(Protocol):
    """A linear layer with adapters, of which those named in `active` are added to it; it need not have all of them."""

    base_layer: nn.Module
    lora_A: Mapping[str, Tensor]
    lora_B: Mapping[str, Tensor]
    scaling: Mapping[str, float]
    active: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The adapters of M layers that read the same input."""

    a_MZK: Tensor
    b_NZ: Tensor
    scale_MZ: Tensor

    @property
    def block(self) -> int:
        """Ranks that a program takes at once; they divide Z."""
        return block_of(self.a_MZK.shape[1])


def is_adapted(module: object) -> TypeGuard[LoraLayer]:
    return hasattr(module, "lora_A") and hasattr(module, "active")


def base_layer(module: nn.Module) -> nn.Linear:
    """The layer itself, without its adapters."""
    return cast(nn.Linear, module.base_layer if is_adapted(module) else module)


def rank_of(module: object) -> int:
    """Of all adapters that are active in a layer together."""
    return sum(len(a_RK) for a_RK, _, _ in active_adapters(module))


def active_adapters(module: object) -> list[tuple[Tensor, Tensor, float]]:
    """A (R, K), B (N, R) and the scale of each adapter that is added to a layer."""
    if not is_adapted(module):
        return []
    names = [name for name in module.active if name in module.lora_A]
    return [(module.lora_A[name], module.lora_B[name], module.scaling[name]) for name in names]


def block_of(rank: int) -> int:
    """
    >>> [block_of(rank) for rank in (1, 16, 24, 64, 200)]
    [16, 16, 32, 64, 64]
    """
    return next((block for block in (16, 32) if rank <= block), 64)


class Adapters:
    """The low-rank parts of some layers, by groups that read the same input, in memory of their own."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def together(self, layers: Sequence[nn.Module]) -> LowRank | None:
        """Those of layers that read the same input; None where no adapter is active. They are filled by `refresh`."""
        rank = max(map(rank_of, layers))
        if rank == 0:
            return None
        bases = [base_layer(layer).weight for layer in layers]
        padded = -(-rank // block_of(rank)) * block_of(rank)
        outputs = [len(base_NK) for base_NK in bases]
        low = LowRank(
            a_MZK=bases[0].new_zeros(len(layers), padded, bases[0].shape[1]),
            b_NZ=bases[0].new_zeros(sum(outputs), padded),
            scale_MZ=bases[0].new_zeros(len(layers), padded, dtype=torch.float32),
        )
        for layer, a_ZK, b_NZ, scale_Z in zip(layers, low.a_MZK, low.b_NZ.split(outputs), low.scale_MZ, strict=True):
            self._place(layer, a_ZK, b_NZ, scale_Z)
        return low

    def refresh(self) -> None:
        """Take the adapters as the trainer has them now."""
        if self._targets:
            with torch.no_grad():
                _torch._foreach_copy_(self._targets, self._sources)

    def _place(self, layer: nn.Module, a_ZK: Tensor, b_NZ: Tensor, scale_Z: Tensor) -> None:
        start = 0
        for a_RK, b_NR, scale in active_adapters(layer):
            stop = start + len(a_RK)
            self._targets += [a_ZK[start:stop], b_NZ[:, start:stop]]
            self._sources += [a_RK, b_NR]
            scale_Z[start:stop] = scale
            start = stop
