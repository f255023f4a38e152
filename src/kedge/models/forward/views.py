"""A decoder seen with other layers: of the same class, over the same modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def view(decoder: Any, layers: Sequence[nn.Module], *, norm: nn.Module) -> PreTrainedModel:
    """A decoder with these layers: a shallow copy, so that rotary embeddings and settings are the same objects."""
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    twin.layers = nn.ModuleList(layers)
    twin.norm = norm
    return twin
