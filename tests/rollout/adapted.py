"""Models with LoRA adapters whose B are not zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from kedge.models.forward.lora import LoraLinear


@torch.no_grad()
def add_adapters(
    model: Any, ranks: Mapping[str, int], *, targets: Collection[str] | None = None, size: float = 0.05
) -> None:
    """Adapters of these names and ranks, all active, on all linear layers of the blocks or on those named `targets`.
    Their B are not zero: `size` is what their entries deviate by."""
    generator = torch.Generator().manual_seed(5)
    blocks = model.get_decoder().layers
    named = [(path, module) for path, module in blocks.named_modules() if type(module) is nn.Linear]
    for path, base in named:
        parent, _, name = path.rpartition(".")
        if targets is not None and name not in targets:
            continue
        layer = LoraLinear(base)
        for adapter, rank in ranks.items():
            a_RK = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
            b_NR = torch.randn(base.out_features, rank, generator=generator) * size
            layer.lora_A[adapter] = nn.Parameter(a_RK.to(base.weight.device, base.weight.dtype))
            layer.lora_B[adapter] = nn.Parameter(b_NR.to(base.weight.device, base.weight.dtype))
            layer.scaling[adapter], layer.dropout[adapter] = 1.7 + len(layer.scaling), 0.0
        layer.active = tuple(ranks)
        setattr(blocks.get_submodule(parent), name, layer)


def activate(model: nn.Module, names: tuple[str, ...]) -> None:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.active = names
