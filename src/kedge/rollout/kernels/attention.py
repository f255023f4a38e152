# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Attention of one new token a row over the columns of its row that are filled, and over no others.

One program holds all query heads of a key head, so that keys and values are read once. The columns of a row may be
split over programs (flash-decoding): each leaves its own attention and the log of its weight, and `_combine` adds them.
Shape letters: R slots, P places of the cache, H key heads, G query heads a key head, S columns, D head width, C splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.kernels.chain import fetch, follow
from kedge.rollout.kernels.launch import launch
from kedge.rollout.tiles import Reading, reading_for

LOG2_E = 1.4426950408889634
"""Powers of two are what the hardware computes."""


def decode_attention(
    q_RHGD: Tensor,
    keys_PHSD: Tensor,
    values_PHSD: Tensor,
    place_R: Tensor,
    column_R: Tensor,
    *,
    scale: float,
    reading: Reading | None = None,
    chained: bool = False,
) -> Tensor:
    """(R, H, G, D): row r attends to columns 0 … `column_R[r]` of place `place_R[r]`; no launch depends on a length."""
    rows, heads, group, width = q_RHGD.shape
    reading = reading or reading_for(rows, heads, keys_PHSD.shape[2])
    splits = reading.splits
    sizes = {"GROUP": group, "PADDED": max(16, triton.next_power_of_2(group)), "D": width, "SPLITS": splits}
    flags = {"CHAINED": chained, "launch_pdl": chained, "num_warps": reading.warps}
    out_RHGD = torch.empty_like(q_RHGD)
    parts, weights_RHCG = out_RHGD, None
    if splits > 1:
        parts = q_RHGD.new_empty(rows, heads, splits, group, width, dtype=torch.float32)
        weights_RHCG = q_RHGD.new_empty(rows, heads, splits, group, dtype=torch.float32)
    launch(_attend, (heads, rows, splits))(
        q_RHGD,
        keys_PHSD,
        values_PHSD,
        place_R,
        column_R,
        parts,
        weights_RHCG,
        scale * LOG2_E,
        keys_PHSD.stride(0),
        keys_PHSD.stride(1),
        BLOCK_S=reading.columns,
        IS_EARLY=chained and reading.is_early,
        num_stages=reading.stages,
        **sizes,
        **flags,
    )
    if splits > 1:
        launch(_combine, (heads, rows))(parts, weights_RHCG, out_RHGD, **sizes, **flags)
    return out_RHGD


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    place_ptr,
    column_ptr,
    out_ptr,
    weight_ptr,
    scale,
    place_stride,
    head_stride,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_head = row * tl.num_programs(0) + head
    length = tl.load(column_ptr + row).to(tl.int32) + 1
    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_S) * BLOCK_S
    start = split * span
    stop = tl.minimum(start + span, length)

    g, d, s = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, BLOCK_S)
    in_group = (g < GROUP)[:, None]
    base = tl.load(place_ptr + row) * place_stride + head * head_stride
    if IS_EARLY:  # of these columns only the newest is still being written
        for at in range(start, stop, BLOCK_S):
            fetch(k_ptr + base + tl.minimum(at + s, stop - 1) * D)
            fetch(v_ptr + base + tl.minimum(at + s, stop - 1) * D)
    follow(CHAINED)
    q_GD = tl.load(q_ptr + (row_head * GROUP + g[:, None]) * D + d, mask=in_group, other=0.0)
    top_G = tl.full([PADDED], -1e30, tl.float32)  # not -inf: a split without columns would give inf - inf
    total_GS = tl.zeros([PADDED, BLOCK_S], tl.float32)
    mixed_GD = tl.zeros([PADDED, D], tl.float32)
    for at in range(start, stop, BLOCK_S):
        inside = at + s < stop
        k_DS = tl.load(k_ptr + base + (at + s)[None, :] * D + d[:, None], mask=inside[None, :], other=0.0)
        v_SD = tl.load(v_ptr + base + (at + s)[:, None] * D + d, mask=inside[:, None], other=0.0)
        score_GS = tl.where(inside[None, :], tl.dot(q_GD, k_DS, input_precision="ieee") * scale, float("-inf"))
        new_G = tl.maximum(top_G, tl.max(score_GS, 1))
        weight_GS = tl.exp2(score_GS - new_G[:, None])
        shrink_G = tl.exp2(top_G - new_G)
        total_GS = total_GS * shrink_G[:, None] + weight_GS  # summed once, at the end
        mixed_GD = mixed_GD * shrink_G[:, None]
        mixed_GD = tl.dot(weight_GS.to(v_SD.dtype), v_SD, mixed_GD, input_precision="ieee")
        top_G = new_G
    total_G = tl.sum(total_GS, 1)
    mixed_GD = mixed_GD / tl.maximum(total_G, 1e-30)[:, None]
    at_split = row_head * SPLITS + split
    tl.store(out_ptr + (at_split * GROUP + g[:, None]) * D + d, mixed_GD.to(out_ptr.dtype.element_ty), mask=in_group)
    if SPLITS > 1:
        weight_G = tl.where(total_G > 0, top_G + tl.log2(tl.maximum(total_G, 1e-30)), -1e30)
        tl.store(weight_ptr + at_split * GROUP + g, weight_G, mask=g < GROUP)


@triton.jit
def _combine(
    parts_ptr,
    weight_ptr,
    out_ptr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row_head = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    g, d = tl.arange(0, PADDED), tl.arange(0, D)
    in_group = g < GROUP
    top_G = tl.full([PADDED], -1e30, tl.float32)
    total_G = tl.zeros([PADDED], tl.float32)
    mixed_GD = tl.zeros([PADDED, D], tl.float32)
    for split in range(SPLITS):
        at = (row_head * SPLITS + split) * GROUP + g
        weight_G = tl.load(weight_ptr + at, mask=in_group, other=-1e30)
        part_GD = tl.load(parts_ptr + at[:, None] * D + d, mask=in_group[:, None], other=0.0)
        new_G = tl.maximum(top_G, weight_G)
        share_G, shrink_G = tl.exp2(weight_G - new_G), tl.exp2(top_G - new_G)
        total_G = total_G * shrink_G + share_G
        mixed_GD = mixed_GD * shrink_G[:, None] + part_GD * share_G[:, None]
        top_G = new_G
    out_GD = (mixed_GD / total_G[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row_head * GROUP + g[:, None]) * D + d, out_GD, mask=in_group[:, None])
