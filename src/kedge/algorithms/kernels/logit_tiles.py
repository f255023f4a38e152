# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""The work on a tile of logits (see `algorithms/logit_tiles`), each as one kernel that reads the tile once.

Shape letters: R tokens and C vocabulary entries of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def sums(logits_RC: Tensor, temperature: float, with_dot: bool, is_kept: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row: top = max z, Σ exp(y) and Σ y exp(y), where y = (z - top) / temperature. The tile stays as it is."""
    del is_kept
    rows, columns = logits_RC.shape
    top_R, sum_R, dot_R = (logits_RC.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _sums[(rows,)](
        logits_RC,
        top_R,
        sum_R,
        dot_R,
        columns,
        logits_RC.stride(0),
        1 / temperature,
        WITH_DOT=with_dot,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return top_R, sum_R, dot_R if with_dot else None


def gradients(
    logits_RC: Tensor, norm_R: Tensor, constant_R: Tensor, h_R: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    """p (constant - h log p), where log p = (z - norm) / temperature."""
    rows, columns = logits_RC.shape
    out_RC = torch.empty_like(logits_RC, dtype=dtype)
    _gradients[(rows, triton.cdiv(columns, _BLOCK))](
        logits_RC,
        norm_R,
        constant_R,
        constant_R if h_R is None else h_R,
        out_RC,
        columns,
        logits_RC.stride(0),
        1 / temperature,
        HAS_H=h_R is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out_RC


@triton.jit
def _sums(
    logits_ptr,
    top_ptr,
    sum_ptr,
    dot_ptr,
    columns,
    stride,
    inverse_temperature,
    WITH_DOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Each lane has sums of its own, which are joined at the end: one reduction a row instead of one a block.
    top_B = tl.full((BLOCK,), -1e30, dtype=tl.float32)
    sum_B = tl.zeros((BLOCK,), dtype=tl.float32)
    dot_B = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z_B = tl.load(logits_ptr + row * stride + c, mask=c < columns, other=-1e30).to(tl.float32)
        new_top_B = tl.maximum(top_B, z_B)
        shift_B = (top_B - new_top_B) * inverse_temperature
        y_B = (z_B - new_top_B) * inverse_temperature
        scale_B = tl.exp(shift_B)
        # An entry outside of the row must not count where nothing inside has been seen yet.
        exp_B = tl.where(c < columns, tl.exp(y_B), 0.0)
        if WITH_DOT:
            dot_B = (dot_B + sum_B * shift_B) * scale_B + exp_B * y_B
        sum_B = sum_B * scale_B + exp_B
        top_B = new_top_B
    top = tl.max(top_B, 0)
    shift_B = (top_B - top) * inverse_temperature
    scale_B = tl.exp(shift_B)
    tl.store(top_ptr + row, top)
    tl.store(sum_ptr + row, tl.sum(sum_B * scale_B, 0))
    if WITH_DOT:
        # A lane that has seen nothing has a shift so low that its product would not be a number.
        tl.store(dot_ptr + row, tl.sum(tl.where(sum_B > 0, (dot_B + sum_B * shift_B) * scale_B, 0.0), 0))


@triton.jit
def _gradients(
    logits_ptr,
    norm_ptr,
    constant_ptr,
    h_ptr,
    out_ptr,
    columns,
    stride,
    inverse_temperature,
    HAS_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    z_B = tl.load(logits_ptr + row * stride + c, mask=inside, other=0.0).to(tl.float32)
    logp_B = (z_B - tl.load(norm_ptr + row)) * inverse_temperature
    factor_B = tl.load(constant_ptr + row)
    if HAS_H:
        factor_B = factor_B - tl.load(h_ptr + row) * logp_B
    out_B = tl.exp(logp_B) * factor_B
    tl.store(out_ptr + row * columns + c, out_B.to(out_ptr.dtype.element_ty), mask=inside)
