# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""What a layer computes between its matrix products, forward and backward, each as one kernel.

They compute in float32 and round once. Shape letters: N tokens, D width of a row, H heads, E width of a head, F inner
width, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528
"""Of a backward pass of a norm, each with its own sum for the gradient of the weights: four a processor of an H200."""
_BLOCK = 1024


def add_norm(stream_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of both in the type of the stream, its RMS norm in the type of the weights, and 1 / RMS of each row."""
    rows, width = stream_ND.shape
    sum_ND = stream_ND if added_ND is None else torch.empty_like(stream_ND)
    normed_ND = torch.empty_like(stream_ND, dtype=weight_D.dtype)
    inverse_N = stream_ND.new_empty(rows, dtype=torch.float32)
    _add_norm[(rows,)](
        stream_ND,
        stream_ND if added_ND is None else added_ND,
        weight_D,
        sum_ND,
        normed_ND,
        inverse_N,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADDS=added_ND is not None,
        num_warps=_warps(width),
    )
    return sum_ND, normed_ND, inverse_N


def add_norm_backward(
    sum_ND: Tensor,
    weight_D: Tensor,
    inverse_N: Tensor,
    of_sum_ND: Tensor | None,
    of_normed_ND: Tensor,
    *,
    adds: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the stream, of what was added to it (in the type of the weights) and of the weights."""
    rows, width = sum_ND.shape
    programs = min(rows, _PROGRAMS)
    of_stream_ND = torch.empty_like(sum_ND)
    of_added_ND = torch.empty_like(sum_ND, dtype=weight_D.dtype) if adds else None
    of_weight_PD = sum_ND.new_empty(programs, width, dtype=torch.float32) if needs_weight else None
    _add_norm_backward[(programs,)](
        sum_ND,
        weight_D,
        inverse_N,
        of_normed_ND if of_sum_ND is None else of_sum_ND,
        of_normed_ND,
        of_stream_ND,
        of_stream_ND if of_added_ND is None else of_added_ND,
        of_stream_ND if of_weight_PD is None else of_weight_PD,
        rows,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        HAS_SUM=of_sum_ND is not None,
        ADDS=adds,
        NEEDS_WEIGHT=needs_weight,
        num_warps=_warps(width),
    )
    of_weight_D = None if of_weight_PD is None else of_weight_PD.sum(0).to(weight_D.dtype)
    return of_stream_ND, of_added_ND, of_weight_D


def rotate(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor, *, back: bool = False) -> Tensor:
    """Rotary position embedding with the two halves of a head apart; `back` turns the other way, as gradients need."""
    tokens, heads, width = x_NHE.shape
    out_NHE = torch.empty_like(x_NHE, memory_format=torch.contiguous_format)
    _rotate[(tokens,)](
        x_NHE,
        cos_NE,
        sin_NE,
        out_NHE,
        x_NHE.stride(0),
        x_NHE.stride(1),
        cos_NE.stride(0),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HALF=width // 2,
        HALF_PADDED=triton.next_power_of_2(width // 2),
        SIGN=-1.0 if back else 1.0,
        num_warps=4,
    )
    return out_NHE


def gate(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """silu(gate) · up."""
    out_NF = torch.empty_like(gate_NF)
    _gate[(triton.cdiv(gate_NF.numel(), _BLOCK),)](gate_NF, up_NF, out_NF, gate_NF.numel(), BLOCK=_BLOCK, num_warps=4)
    return out_NF


def gate_backward(gate_NF: Tensor, up_NF: Tensor, of_out_NF: Tensor) -> tuple[Tensor, Tensor]:
    of_gate_NF, of_up_NF = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    _gate_backward[(triton.cdiv(gate_NF.numel(), _BLOCK),)](
        gate_NF, up_NF, of_out_NF, of_gate_NF, of_up_NF, gate_NF.numel(), BLOCK=_BLOCK, num_warps=4
    )
    return of_gate_NF, of_up_NF


def _warps(width: int) -> int:
    """
    >>> [_warps(width) for width in (64, 576, 1536, 4096)]
    [1, 4, 8, 16]
    """
    return min(16, max(1, triton.next_power_of_2(width) // 256))


@triton.jit
def _add_norm(
    stream_ptr,
    added_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    inverse_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    inside = d < WIDTH
    x_D = tl.load(stream_ptr + row * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x_D += tl.load(added_ptr + row * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row * WIDTH + d, x_D.to(sum_ptr.dtype.element_ty), mask=inside)
    inverse = tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + eps)
    tl.store(inverse_ptr + row, inverse)
    weight_D = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * WIDTH + d, (x_D * inverse * weight_D).to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    sum_ptr,
    weight_ptr,
    inverse_ptr,
    of_sum_ptr,
    of_normed_ptr,
    of_stream_ptr,
    of_added_ptr,
    of_weight_ptr,
    rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_SUM: tl.constexpr,
    ADDS: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
):
    program = tl.program_id(0)
    d = tl.arange(0, PADDED)
    inside = d < WIDTH
    weight_D = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    of_weight_D = tl.zeros((PADDED,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = (row + tl.zeros((PADDED,), dtype=tl.int64)) * WIDTH + d  # rows times width may not fit into 32 bits
        inverse = tl.load(inverse_ptr + row)
        unit_D = tl.load(sum_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse
        upstream_D = tl.load(of_normed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if NEEDS_WEIGHT:
            of_weight_D += upstream_D * unit_D
        weighted_D = upstream_D * weight_D
        out_D = inverse * (weighted_D - unit_D * (tl.sum(weighted_D * unit_D, 0) / WIDTH))
        if HAS_SUM:
            out_D += tl.load(of_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_stream_ptr + at, out_D.to(of_stream_ptr.dtype.element_ty), mask=inside)
        if ADDS:
            tl.store(of_added_ptr + at, out_D.to(of_added_ptr.dtype.element_ty), mask=inside)
    if NEEDS_WEIGHT:
        tl.store(of_weight_ptr + program * WIDTH + d, of_weight_D, mask=inside)


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    position_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    SIGN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_H1 = tl.arange(0, HEADS_PADDED)[:, None]
    e_1E = tl.arange(0, HALF_PADDED)[None, :]
    inside_HE = (head_H1 < HEADS) & (e_1E < HALF)
    in_half = e_1E < HALF
    cos_1E = tl.load(cos_ptr + token * position_stride + e_1E, mask=in_half, other=0.0).to(tl.float32)
    sin_1E = tl.load(sin_ptr + token * position_stride + e_1E, mask=in_half, other=0.0).to(tl.float32) * SIGN
    in_HE = x_ptr + token * token_stride + head_H1 * head_stride + e_1E
    low_HE = tl.load(in_HE, mask=inside_HE, other=0.0).to(tl.float32)
    high_HE = tl.load(in_HE + HALF, mask=inside_HE, other=0.0).to(tl.float32)
    out_HE = out_ptr + (token * HEADS + head_H1) * (2 * HALF) + e_1E
    kind = out_ptr.dtype.element_ty
    tl.store(out_HE, (low_HE * cos_1E - high_HE * sin_1E).to(kind), mask=inside_HE)
    tl.store(out_HE + HALF, (high_HE * cos_1E + low_HE * sin_1E).to(kind), mask=inside_HE)


@triton.jit
def _gate(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_B = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (gate_B * tl.sigmoid(gate_B) * up_B).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(gate_ptr, up_ptr, of_out_ptr, of_gate_ptr, of_up_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_B = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up_B = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    upstream_B = tl.load(of_out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share_B = tl.sigmoid(gate_B)
    silu_B = gate_B * share_B
    slope_B = share_B + silu_B * (1 - share_B)
    tl.store(of_gate_ptr + at, (upstream_B * up_B * slope_B).to(of_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(of_up_ptr + at, (upstream_B * silu_B).to(of_up_ptr.dtype.element_ty), mask=inside)
