# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""The residual stream between two products, and its norms.

A norm is split: whoever writes the stream also writes it times the next norm's weight, and the sum of its squares by
tiles; the product that reads it divides by the root afterwards. So every product reads its input as it lies in memory.
The stream itself is float32: some models have entries of ten thousand in it, beside which bfloat16 loses the others.
Shape letters: R slots, V vocabulary, W width, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.kernels.chain import follow
from kedge.rollout.kernels.launch import launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The residual stream between two products: as it is in float32, times the next norm's weight in the type of the
    weights, and its squares by tiles."""

    plain_RW: Tensor
    weighted_RW: Tensor
    squares_RN: Tensor


def embed(token_R: Tensor, table_VW: Tensor, norm_W: Tensor, *, chained: bool = False) -> Stream:
    rows, width = len(token_R), table_VW.shape[1]
    stream = Stream(
        plain_RW=table_VW.new_empty(rows, width, dtype=torch.float32),
        weighted_RW=table_VW.new_empty(rows, width),
        squares_RN=table_VW.new_empty(rows, 1, dtype=torch.float32),
    )
    launch(_embed, (rows,))(
        token_R,
        table_VW,
        norm_W,
        stream.plain_RW,
        stream.weighted_RW,
        stream.squares_RN,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return stream


def normed(stream: Stream, eps: float, *, chained: bool = False) -> Tensor:
    """The stream after its norm, for whoever reads it otherwise than by the products here."""
    rows, width = stream.weighted_RW.shape
    out_RW = torch.empty_like(stream.weighted_RW)
    tiles = stream.squares_RN.shape[1]
    launch(_normed, (rows,))(
        stream.weighted_RW,
        stream.squares_RN,
        out_RW,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles),
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )
    return out_RW


@triton.jit
def load_squares(squares_ptr, row_R, TILES: tl.constexpr, PADDED: tl.constexpr):
    n = tl.arange(0, PADDED)
    return tl.load(squares_ptr + row_R[:, None] * TILES + n, mask=(n < TILES)[None, :], other=0.0)


@triton.jit
def inverse_root(squares_RN, eps, WIDTH: tl.constexpr):
    """What a norm multiplies by. Apart from the load, so that a product can run in between."""
    return tl.rsqrt(tl.sum(squares_RN, 1) / WIDTH + eps)


@triton.jit
def _embed(
    token_ptr,
    table_ptr,
    norm_ptr,
    plain_ptr,
    weighted_ptr,
    squares_ptr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0)
    w = tl.arange(0, PADDED)
    inside = w < WIDTH
    x_W = tl.load(table_ptr + tl.load(token_ptr + row) * WIDTH + w, mask=inside, other=0.0)
    norm_W = tl.load(norm_ptr + w, mask=inside, other=0.0).to(tl.float32)
    wide_W = x_W.to(tl.float32)
    tl.store(plain_ptr + row * WIDTH + w, wide_W, mask=inside)
    tl.store(weighted_ptr + row * WIDTH + w, (wide_W * norm_W).to(x_W.dtype), mask=inside)
    tl.store(squares_ptr + row, tl.sum(wide_W * wide_W, 0))


@triton.jit
def _normed(
    weighted_ptr,
    squares_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0)
    w, n = tl.arange(0, PADDED), tl.arange(0, TILES_PADDED)
    squares = tl.sum(tl.load(squares_ptr + row * TILES + n, mask=n < TILES, other=0.0), 0)
    x_W = tl.load(weighted_ptr + row * WIDTH + w, mask=w < WIDTH, other=0.0)
    out_W = x_W.to(tl.float32) * tl.rsqrt(squares / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + w, out_W.to(x_W.dtype), mask=w < WIDTH)
