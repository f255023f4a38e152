"""LoRA adapters worked into plain layers while answers are sampled, for kernels that read one matrix a layer.

Each merged layer holds W + scale · B · A, added in float32 and rounded once to the type of W, stochastically: a change
too small for bfloat16 still counts in the mean. The model's own weights are never written, and the merged ones exist
only while rows are decoded. Left out: quantised bases.
Shape letters: N outputs and K inputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from kedge.models.forward.lora import LoraLinear

_ALIGNED = 128
"""Bytes: what the copy engine of a GPU asks of an address, and more."""


class MergedLayers:
    """Plain layers that stand in for adapted ones while rows are decoded. They are kept between calls, so that a graph
    finds them again."""

    def __init__(self) -> None:
        self._plain: dict[nn.Module, nn.Linear] = {}

    @contextmanager
    def within(self, model: nn.Module) -> Generator[None]:
        """Within, no layer of `model` has an adapter; afterwards it is as it was, and the merged weights are freed."""
        places = list(_places(model))
        adapted = [module for _, _, module in places]
        self._plain = {module: self._plain.get(module) or _plain(module) for module in adapted}
        for module, weight in zip(adapted, _merged_weights(adapted), strict=True):
            self._plain[module].weight.data = weight
        try:
            for parent, name, module in places:
                setattr(parent, name, self._plain[module])
            yield
        finally:
            for parent, name, module in places:
                setattr(parent, name, module)
            for plain in self._plain.values():
                plain.weight.data = plain.weight.new_empty(0)


def unsupported_adapter_reason(module: LoraLinear) -> str | None:
    """Why an adapted layer cannot be merged into one matrix; None where it can."""
    if type(module.base_layer) is not nn.Linear:
        kind = type(module.base_layer)
        return f"an adapter on a {kind.__module__}.{kind.__name__}, not on a plain linear layer"
    return None


def _places(model: nn.Module) -> Iterable[tuple[nn.Module, str, LoraLinear]]:
    """Every adapted layer, with the module that has it and its name there."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if isinstance(module, LoraLinear):
                yield parent, name, module


def _plain(module: LoraLinear) -> nn.Linear:
    """A linear layer without a matrix of its own yet, and with the bias of the adapted one."""
    plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    plain.bias = cast("nn.Parameter", module.bias)
    return plain


def _merged_weights(adapted: list[LoraLinear]) -> list[Tensor]:
    """The matrices with their adapters, in one block of memory: a block of the same size is likely to be allocated at
    the same address the next time, where graphs look for it."""
    bases = [module.weight.detach() for module in adapted]
    if not bases:
        return []
    starts = [0, *accumulate(-(-base_NK.nbytes // _ALIGNED) * _ALIGNED for base_NK in bases)]
    memory = torch.empty(starts[-1], dtype=torch.uint8, device=bases[0].device)
    # Always the same seed: a weight changes only when the adapter does, and a resumed run samples the same answers.
    rng = torch.Generator(bases[0].device).manual_seed(0)
    merged: list[Tensor] = []
    for module, base_NK, start in zip(adapted, bases, starts, strict=False):
        merged_NK = memory[start : start + base_NK.nbytes].view(base_NK.dtype).view_as(base_NK)
        merged.append(merged_NK.copy_(_rounded(module.merged(module.active), base_NK.dtype, rng)))
    return merged


def _rounded(wide_NK: Tensor, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Stochastic rounding to bfloat16: up or down with the odds of how near each is. A number it can hold stays.

    Rounded to the nearest, the first updates of an adapter would be lost in every entry: half a unit in the last place
    is 0.4 % of a weight.
    """
    if dtype != torch.bfloat16:
        return wide_NK.to(dtype)
    noise_NK = torch.randint(2**16, wide_NK.shape, generator=rng, device=wide_NK.device, dtype=torch.int32)
    return ((wide_NK.view(torch.int32) + noise_NK) & -(2**16)).view(torch.float32).to(dtype)
