# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Products of some rows with some rows of a matrix (out, in), in float32: the inner loops of the other kernels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def tiled(matrix: Tensor, rows: int, depth: int) -> Any:
    """A matrix as the copy engine reads it, in tiles; rows beyond its last are zeros."""
    return TensorDescriptor.from_tensor(matrix, [rows, depth])


@triton.jit
def product(x_tiles, w_tiles, row, n, start, stop, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x[row …, start … stop] · w[n …, start … stop]ᵀ, in float32."""
    out_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for at in range(start, stop, BLOCK_K):
        out_RN = tl.dot(x_tiles.load([row, at]), w_tiles.load([n, at]).T, out_RN, input_precision="ieee")
    return out_RN


@triton.jit
def two_products(
    x_tiles,
    a_tiles,
    b_tiles,
    row,
    n,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The product of the same rows with the same rows of each of two matrices."""
    a_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    b_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        x_RK = x_tiles.load([row, at])
        a_RN = tl.dot(x_RK, a_tiles.load([n, at]).T, a_RN, input_precision="ieee")
        b_RN = tl.dot(x_RK, b_tiles.load([n, at]).T, b_RN, input_precision="ieee")
    return a_RN, b_RN
