# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""AdamW over many weights in one launch: each program finds its weight through a table of addresses.

Shape letters: K weights, P programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.core.records import send

_BLOCK = 2048
"""Entries of a weight that one program updates."""
_ALIGNMENT = 16
"""Bytes that the kernel reads at once."""


def apply_updates(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: Mapping[str, Any],
    *,
    scale: Tensor,
    step: float,
) -> None:
    """Step number `step`, from 1, of AdamW on the gradients times `scale`; `settings` are a group of torch's AdamW.

    Weights are written from their masters; either all of them are their own masters, or none. Gradients have one type.
    `scale` stays on the device, so nobody waits for it; where it is not a number, nothing is written.
    """
    device = masters[0].device
    gradients = [_readable(gradient) for gradient in gradients]  # kept alive until the launch
    addresses = [[x.data_ptr() for x in tensors] for tensors in (weights, masters, gradients, means, squares)]
    addresses_5K = send(torch.tensor(addresses), device)
    sizes_K, which_P, first_P = _programs(tuple(master.numel() for master in masters), device)
    if not len(which_P):  # parts of weights may be empty
        return
    beta1, beta2 = settings["betas"]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        _adamw[(len(which_P),)](
            addresses_5K,
            sizes_K,
            which_P,
            first_P,
            len(masters),
            scale,
            1 - beta1,
            1 - beta2,
            settings["eps"],
            1 - settings["lr"] * settings["weight_decay"],
            settings["lr"] / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            HAS_COPY=weights[0] is not masters[0],
            IS_NARROW=gradients[0].dtype == torch.bfloat16,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _readable(gradient: Tensor) -> Tensor:
    """The gradient, contiguous and aligned as the kernel reads it."""
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % _ALIGNMENT else gradient


@lru_cache(maxsize=4096)  # a few sets of weights, or the buckets of weights whose state is in host memory
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of the weights, and for every program the index of its weight and the first entry that it updates."""
    blocks_K = torch.tensor([-(-size // _BLOCK) for size in sizes])
    which_P = torch.arange(len(sizes)).repeat_interleave(blocks_K)
    first_P = (torch.arange(len(which_P)) - (blocks_K.cumsum(0) - blocks_K)[which_P]) * _BLOCK
    return torch.tensor(sizes, device=device), which_P.int().to(device), first_P.to(device)


@triton.jit
def _adamw(
    addresses_ptr,
    sizes_ptr,
    which_ptr,
    first_ptr,
    count,
    scale_ptr,
    mean_gain,
    square_gain,
    eps,
    decay,
    rate,
    square_factor,
    HAS_COPY: tl.constexpr,
    IS_NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(which_ptr + program)
    scale = tl.load(scale_ptr)
    at = tl.load(first_ptr + program) + tl.arange(0, BLOCK)
    in_bounds = at < tl.where(scale >= 0, tl.load(sizes_ptr + number), 0)  # no NaN is
    table = addresses_ptr + number
    master_ptr = tl.multiple_of(tl.load(table + count).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(table + 3 * count).to(tl.pointer_type(tl.float32)), 16)
    square_ptr = tl.multiple_of(tl.load(table + 4 * count).to(tl.pointer_type(tl.float32)), 16)
    if IS_NARROW:
        gradient_ptr = tl.multiple_of(tl.load(table + 2 * count).to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        gradient_ptr = tl.multiple_of(tl.load(table + 2 * count).to(tl.pointer_type(tl.float32)), 16)
    gradient = tl.load(gradient_ptr + at, mask=in_bounds).to(tl.float32) * scale
    mean = tl.load(mean_ptr + at, mask=in_bounds)
    square = tl.load(square_ptr + at, mask=in_bounds)
    master = tl.load(master_ptr + at, mask=in_bounds)
    mean += mean_gain * (gradient - mean)
    square += square_gain * (gradient * gradient - square)
    master = decay * master - rate * mean / (tl.sqrt(square) * square_factor + eps)
    tl.store(mean_ptr + at, mean, mask=in_bounds)
    tl.store(square_ptr + at, square, mask=in_bounds)
    tl.store(master_ptr + at, master, mask=in_bounds)
    if HAS_COPY:
        weight_ptr = tl.multiple_of(tl.load(table).to(tl.pointer_type(tl.bfloat16)), 16)
        tl.store(weight_ptr + at, master.to(tl.bfloat16), mask=in_bounds)
