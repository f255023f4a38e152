"""Hashes of weights: what tells one reference, base or cached computation from another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.files import HASHED_AT_ONCE, hash_folder, hash_json
from kedge.models.forward.lora import adapters_of
from kedge.models.forward.parts import gathered, is_part
from kedge.models.forward.sharding import compute_dtype, is_sharded


def module_hash(module: nn.Module, *, with_adapters: bool = False) -> str:
    """Hash of the names, types, shapes and bits of a model's weights.

    LoRA adapters count only with `with_adapters`; without, a model hashes the same whether or not it carries some. An
    adapter that belongs to the base counts always.
    """
    adapters = adapters_of(module)
    of_base = tuple(f".{name}" for name in adapters.beneath) if adapters else ()
    weights = {
        name.replace(".base_layer", ""): tensor  # the layer below an adapter
        for name, tensor in module.state_dict().items()
        if with_adapters or ".lora_" not in name or name.endswith(of_base)
    }
    named = sorted(weights.items())
    if is_sharded(module):  # one after the other, as all processes gather them
        dtype = compute_dtype(cast(PreTrainedModel, module))
        return hash_json([_tensor_hash(name, _as_computed(tensor, dtype)) for name, tensor in named])
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        return hash_json(list(pool.map(_tensor_hash, *zip(*named, strict=True))))


def _tensor_hash(name: str, tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    digest = blake2b(f"{name} {values.dtype} {tuple(values.shape)}\n".encode(), digest_size=16)
    digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _as_computed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as the model computes with it: a part is wider where it learns."""
    return gathered(tensor.detach()).to(dtype) if is_part(tensor) else tensor.detach()


def folder_hash(folder: Path) -> str:
    """Hash of the safetensors files of a model folder; its tokenizer and settings do not count."""
    return hash_folder(folder, suffixes=(".safetensors",))
