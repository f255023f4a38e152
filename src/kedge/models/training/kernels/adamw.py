# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""AdamW over many weights in one launch: each program finds its weight by a table of addresses."""

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
"""Entries of one program."""
_ALIGNED = 16
"""Bytes that the kernel reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One weight and all that its step reads and writes."""

    weight: Tensor
    """Written from the master; the same tensor where there is only one."""
    master: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: float
    """Which step of this weight it is, from 1."""


def move(moved: Sequence[Moved], settings: Mapping[str, Any], *, scale: float) -> None:
    """One step down the gradients times `scale`; `settings` are those of a group of torch's AdamW."""
    kinds: dict[tuple[bool, torch.dtype, float], list[Moved]] = {}
    for one in moved:
        kind = one.weight is not one.master, one.gradient.dtype, one.step
        kinds.setdefault(kind, []).append(one)
    for (has_copy, _, step), same in kinds.items():
        _move(same, settings, scale=scale, step=step, has_copy=has_copy)


def _move(moved: Sequence[Moved], settings: Mapping[str, Any], *, scale: float, step: float, has_copy: bool) -> None:
    device = moved[0].master.device
    gradients = [_readable(one.gradient) for one in moved]  # held until the launch
    addresses_K5 = torch.tensor(
        [
            [tensor.data_ptr() for tensor in (one.weight, one.master, gradient, one.mean, one.square)]
            for one, gradient in zip(moved, gradients, strict=True)
        ]
    ).to(device, non_blocking=True)
    sizes_K, which_P, first_P = _programs(tuple(one.master.numel() for one in moved), device)
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
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % _ALIGNED else gradient


@lru_cache(maxsize=16)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes, and of every program its weight and the first entry of that which is its own."""
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
    kept,
    rate,
    square_factor,
    HAS_COPY: tl.constexpr,
    IS_NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(which_ptr + program)
    at = tl.load(first_ptr + program) + tl.arange(0, BLOCK)
    is_there = at < tl.load(sizes_ptr + number)
    table = addresses_ptr + number * 5
    master_ptr = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(tl.float32)), 16)
    square_ptr = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(tl.float32)), 16)
    if IS_NARROW:
        gradient_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.bfloat16)), 16)
    else:
        gradient_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), 16)
    gradient = tl.load(gradient_ptr + at, mask=is_there).to(tl.float32) * scale
    mean = tl.load(mean_ptr + at, mask=is_there)
    square = tl.load(square_ptr + at, mask=is_there)
    master = tl.load(master_ptr + at, mask=is_there)
    mean += mean_gain * (gradient - mean)
    square += square_gain * (gradient * gradient - square)
    master = kept * master - rate * mean / (tl.sqrt(square) * square_factor + eps)
    tl.store(mean_ptr + at, mean, mask=is_there)
    tl.store(square_ptr + at, square, mask=is_there)
    tl.store(master_ptr + at, master, mask=is_there)
    if HAS_COPY:
        weight_ptr = tl.multiple_of(tl.load(table).to(tl.pointer_type(tl.bfloat16)), 16)
        tl.store(weight_ptr + at, master.to(tl.bfloat16), mask=is_there)
