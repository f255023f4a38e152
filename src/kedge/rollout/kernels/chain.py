# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Kernels that come up while the one before them ends, and use the time to fetch what does not depend on it.

A decoding step is a hundred short kernels, each of which waits for the last: without this the memory idles in between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait for what the kernel before wrote, and let the next one come up. Nothing it wrote may be read earlier."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch(ptr):
    """Ask for the 128 bytes at each address to be in the second-level cache soon."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_rows(w_ptr, ROWS: tl.constexpr, DEPTH: tl.constexpr, start, SPAN: tl.constexpr, CHAINED: tl.constexpr):
    """`fetch` columns `start` … `start + SPAN` of so many rows of a matrix; a line is 64 numbers of two bytes."""
    if CHAINED:
        LINES: tl.constexpr = triton.next_power_of_2((SPAN + 63) // 64)
        line = tl.minimum(start + tl.arange(0, LINES) * 64, tl.minimum(start + SPAN, DEPTH) - 1)
        fetch(w_ptr + tl.arange(0, ROWS)[:, None] * DEPTH + line[None, :])
