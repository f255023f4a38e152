"""Layers compiled one by one: all of a model's share one program, so that it is made in seconds and once a shape.

Generation runs the layers as they are: it has graphs and kernels of its own, and shapes that change at every prompt.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

_PROGRAMS = 32
"""Of one layer, at most: roles that learn or hold still, with gradients or without, rows of one length or of many, each
first for one shape and then for all. They are a dozen; torch would stop at 8 and run the rest as they are written."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compile every transformer block in place; lengths that change make one more program, not one each."""
    dynamo = cast(Any, torch._dynamo)  # pyright: ignore[reportPrivateUsage]: it has no public settings
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _PROGRAMS)
    for layer in _layers(model):
        layer.compile(dynamic=None)


@contextmanager
def uncompiled(model: PreTrainedModel) -> Generator[None]:
    """Within, the blocks run as they are written."""
    layers = _layers(model)
    before = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call


def _layers(model: PreTrainedModel) -> list[Any]:
    """The blocks of a decoder; a model without such a list has none to compile."""
    found = getattr(cast(Any, model.get_decoder()), "layers", ())
    return list(found) if isinstance(found, nn.ModuleList) else []
