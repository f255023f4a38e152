"""Transformer blocks compiled one by one: all blocks of a model share a program, compiled in seconds and once a shape.

Generation runs the blocks uncompiled: it has CUDA graphs and kernels of its own, and its shapes change at every prompt.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

_MAX_PROGRAMS = 32
"""Of one block: roles that learn or are frozen, with gradients or without, rows of equal or of unequal lengths, each
first for one shape and then for all. They are a dozen; torch would stop at 8 and run the rest uncompiled."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every transformer block in place; lengths that change make one more program, not one each."""
    dynamo = cast(Any, torch._dynamo)  # pyright: ignore[reportPrivateUsage]: it has no public settings
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MAX_PROGRAMS)
    for layer in _layers(model):
        layer.compile(dynamic=None)


@contextmanager
def uncompiled(model: PreTrainedModel) -> Generator[None]:
    """Inside of the block, the layers run uncompiled."""
    layers = _layers(model)
    compiled_calls = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, compiled_calls, strict=True):
            layer._compiled_call_impl = call


def _layers(model: PreTrainedModel) -> list[Any]:
    """The blocks of a decoder; a model without such a list has none to compile."""
    layers = getattr(cast(Any, model.get_decoder()), "layers", ())
    return list(layers) if isinstance(layers, nn.ModuleList) else []
