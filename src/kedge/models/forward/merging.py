"""Adapters added to the weights of their base: a plain model, as files and other programs have it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.lora import REGISTRY, adapters_of, attach, is_quantised, required_adapters


def merge(
    model: PreTrainedModel,
    *,
    name: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> PreTrainedModel:
    """A plain model with adapter `name` (what is active if None) added to its weights; `model` is not changed.

    `weights` are more precise ones than the model's own, by the names of its parameters. Sums are computed in float32
    and rounded once, to `dtype` (None: that of the base). What has no adapter is shared with `model` unless its type or
    device changes.
    """
    if is_quantised(model):
        raise ModelError(
            f"{model.name_or_path}: an adapter cannot be merged into a quantised base without rounding it; "
            "save the adapter, load the base in 16 bits, and merge there"
        )
    # New parameters over the same storage: what is changed below gets storage of its own.
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter((weights or {}).get(key, parameter).detach(), requires_grad=False)
        for key, parameter in model.named_parameters()
    }
    twin = copy.deepcopy(model, shared)
    if (adapters := adapters_of(twin)) is not None:
        names = adapters.active if name is None else adapters.stack(name)
        for path, layer in adapters.layers.items():
            merged = layer.merged(names).to(device or layer.weight.device, dtype or layer.weight.dtype)
            layer.base_layer.weight = nn.Parameter(merged, requires_grad=False)
            twin.set_submodule(path, layer.base_layer)
        if adapters.heads is not None:
            adapters.heads.active = names
            cast(Any, twin).score = adapters.heads.current()
        delattr(twin, REGISTRY)
    return cast(PreTrainedModel, nn.Module.to(twin, device=device, dtype=dtype))


def merge_anew(
    model: PreTrainedModel,
    base: PreTrainedModel,
    *,
    name: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """As `merge`, but into `base`, which is changed in place: the base of `model` loaded again in 16 or 32 bits.

    Without adapters it is `base` with `weights`.
    """
    own = dict(base.named_parameters())
    with torch.no_grad():
        for key in own.keys() & (weights or {}).keys():
            own[key].copy_((weights or {})[key])
    adapters = adapters_of(model)
    if adapters is None:
        return merge(base, dtype=dtype)
    names = adapters.active if name is None else adapters.stack(name)
    for part in names:
        paths = [path for path, layer in adapters.layers.items() if part in layer.lora_A]
        attach(base, adapters.known[part], paths, name=part, seed=0)
        precise = {key: (weights or {}).get(key, parameter) for key, parameter in adapters.parameters(part)}
        with torch.no_grad():
            for key, parameter in required_adapters(base).parameters(part):
                parameter.copy_(precise[key])
    required_adapters(base).activate(names)
    return merge(base, dtype=dtype)
