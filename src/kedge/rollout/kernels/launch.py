# pyright: reportMissingImports=false
"""Launching kernels, or only compiling them: all of a decoding step at once, in threads.

One after the other, the fifty kernels of the batch sizes of a run take Triton 17 seconds (SmolLM2-135M on an H200).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

_COMPILES_ALONE: ContextVar[bool] = ContextVar("compiles_alone", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`; inside of `compiling` it is compiled for the arguments it is called with, and does not run."""
    return partial(kernel.warmup, grid=grid) if _COMPILES_ALONE.get() else kernel[grid]


@contextmanager
def compiling() -> Generator[None]:
    """What is launched inside of the block is compiled when the block ends, and nothing has run."""
    token = _COMPILES_ALONE.set(True)
    try:
        with ThreadPoolExecutor(thread_name_prefix="kedge-compile") as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _COMPILES_ALONE.reset(token)
