# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""AdamW over many weights in one launch: each program finds its weight through a table of addresses.

Shape letters: K weights, P programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Entries of a weight that one program updates."""
_ALIGNMENT = 16
"""Bytes that the kernel reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One weight and everything that its step reads and writes."""

    weight: Tensor
    """Written from the master; the same tensor where the weight is its own master."""
    master: Tensor
    gradient: Tensor
    mean: Tensor
    """The first moment."""
    square: Tensor
    """The second moment."""
    step: float
    """The number of steps of this weight with this one, from 1."""


def apply_updates(updates: Sequence[Update], settings: Mapping[str, Any], *, scale: float) -> None:
    """One step of AdamW on the gradients times `scale`; `settings` are a parameter group of torch's AdamW."""
    kinds: dict[tuple[bool, torch.dtype, float], list[Update]] = {}
    for update in updates:
        kind = update.weight is not update.master, update.gradient.dtype, update.step
        kinds.setdefault(kind, []).append(update)
    for (has_copy, _, step), same_kind in kinds.items():
        _launch(same_kind, settings, scale=scale, step=step, has_copy=has_copy)


def _launch(
    updates: Sequence[Update], settings: Mapping[str, Any], *, scale: float, step: float, has_copy: bool
) -> None:
    """One launch for weights that all have a copy or all have none, and that are at the same step."""
    device = updates[0].master.device
    gradients = [_readable(update.gradient) for update in updates]  # kept alive until the launch
    addresses_K5 = torch.tensor(
        [
            [tensor.data_ptr() for tensor in (update.weight, update.master, gradient, update.mean, update.square)]
            for update, gradient in zip(updates, gradients, strict=True)
        ]
    ).to(device, non_blocking=True)
    sizes_K, which_P, first_P = _programs(tuple(update.master.numel() for update in updates), device)
    beta1, beta2 = settings["betas"]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current one
        _adamw[(len(which_P),)](
            addresses_K5,
            sizes_K,
            which_P,
            first_P,
            scale,
            1 - beta1,
            1 - beta2,
            settings["eps"],
            1 - settings["lr"] * settings["weight_decay"],
            settings["lr"] / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            HAS_COPY=has_copy,
            IS_NARROW=gradients[0].dtype == torch.bfloat16,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _readable(gradient: Tensor) -> Tensor:
    """The gradient, contiguous and aligned as the kernel reads it."""
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % _ALIGNMENT else gradient


@lru_cache(maxsize=16)
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
    scale,
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
    at = tl.load(first_ptr + program) + tl.arange(0, BLOCK)
    in_bounds = at < tl.load(sizes_ptr + number)
    table = addresses_ptr + number * 5
    master_ptr = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(tl.float32)), 16)
    square_ptr = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(tl.float32)), 16)
    if IS_NARROW:
        gradient_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        gradient_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), 16)
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
