"""Facts about a model without loading its weights: size, type, context window. It is built on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kedge.core.errors import ModelError
from kedge.models.loading.load import DTypeName, dtype_for, explain
from kedge.models.loading.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`parameters` counts tied weights once; `weights_bytes` is their size in `dtype`."""

    source: str
    architecture: str
    parameters: int
    dtype: str
    weights_bytes: int
    window: int | None
    vocab_size: int
    hidden_size: int
    layers: int
    tied_embeddings: bool


def describe(
    model: str | Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> ModelFacts:
    """The facts of `model` as it would be loaded with these arguments. `window` is None where none is stated."""
    source = resolve(model)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(explain(str(source), error)) from error
    text = config.get_text_config()
    weights_dtype = dtype_for(dtype, device)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    return ModelFacts(
        source=str(source),
        architecture=type(empty).__name__,
        parameters=parameters,
        dtype=str(weights_dtype).removeprefix("torch."),
        weights_bytes=parameters * weights_dtype.itemsize,
        window=getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        tied_embeddings=bool(text.tie_word_embeddings),
    )
