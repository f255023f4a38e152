"""The identity of weights in memory: what a reference is held to."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

from kedge.core.files import hash_json


def module_hash(module: nn.Module, *, without: str = "\0") -> str:
    """Hash of the names, types and bits of the parameters, those aside whose name contains `without`."""
    named = [(name.replace(".base_layer.", "."), one) for name, one in module.named_parameters() if without not in name]
    return hash_json([[name, str(one.dtype), list(one.shape), _bits(one)] for name, one in sorted(named)])


def _bits(parameter: torch.Tensor) -> str:
    flat = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
    return blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
