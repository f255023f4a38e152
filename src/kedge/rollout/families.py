"""Which models the Triton kernels can decode: decoders of the Llama family with plain weights or LoRA on them.

Left out: quantised weights, norms of queries and keys, sliding windows, experts. Models with those decode with
transformers' own modules.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from kedge.rollout.adapters import MAX_RANK, base_layer, rank_of

_FAMILIES = ("llama", "mistral", "qwen2")
_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions that depend on the position alone, not on how long the text is."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot decode this model; None where they can."""
    config = cast(Any, model.get_decoder()).config
    if config.model_type not in _FAMILIES:
        return f"{config.model_type} is not one of {', '.join(_FAMILIES)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "not all of its layers attend to everything"
    if (kind := config.rope_parameters["rope_type"]) not in _ROTATIONS:
        return f"its rotary positions are of kind {kind}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    for name, module in cast(Any, model.get_decoder()).layers.named_modules():
        if name.endswith("_proj") and (reason := _unsupported_layer_reason(module)):
            return f"{name} {reason}"
    if model.device.type == "cuda" and model.dtype.itemsize != 2:
        return f"its weights are {model.dtype}; the kernels hold tiles of two-byte numbers"
    sizes = config.hidden_size, config.intermediate_size, head_width(config)
    if any(size % 32 for size in sizes) or sizes[2] & (sizes[2] - 1):
        return f"its widths {sizes} are not multiples of 32, and the last a power of two"
    gates: list[Any] = [base_layer(layer.mlp.gate_proj) for layer in cast(Any, model.get_decoder()).layers]
    if any(gate.bias is not None for gate in gates):
        return "its inner products have biases"
    return None


def _unsupported_layer_reason(module: nn.Module) -> str | None:
    base = base_layer(module)
    if type(base) is not nn.Linear:
        return f"is a {type(base).__module__}.{type(base).__name__}, not a plain linear layer"
    if (rank := rank_of(module)) > MAX_RANK:
        return f"has adapters of rank {rank}, more than {MAX_RANK}"
    return None


def head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
