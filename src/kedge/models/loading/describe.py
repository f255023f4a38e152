"""Facts about a model without loading its weights: size, type, context window. It is built on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.heads import lm_head
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
    head_dim: int | None
    """Width of one attention head."""
    head_problem: str = ""
    """Why log-probs cannot be computed from its output head, if so."""


def window_of(config: Any) -> int | None:
    """How many tokens a row may have: the positions of the model, or its sliding window or its chunks of attention
    where these are shorter."""
    slides = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    others = (getattr(config, name, None) for name in ("max_position_embeddings", "attention_chunk_size"))
    return min((limit for limit in (*others, slides) if limit), default=None)


def context_window(model: str | Path) -> int | None:
    """The window of a model, from its configuration alone; None where none is stated."""
    source = resolve(model)
    try:
        return window_of(AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config())
    except (OSError, ValueError) as error:
        raise ModelError(explain(str(source), error)) from error


def check_weight_files(folder: Path) -> None:
    """Raise where a file of weights is damaged or cut short: its header must agree with its size."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: damaged or not whole ({error}); copy or download it again") from error


def describe(
    model: str | Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> ModelFacts:
    """The facts of `model` as it would be loaded with these arguments. `window` is None where none is stated."""
    source = resolve(model)
    if isinstance(source, Path):
        check_weight_files(source)
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
        window=window_of(text),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        tied_embeddings=bool(text.tie_word_embeddings),
        head_dim=_head_dim(text),
        head_problem=_head_problem(empty),
    )


def _head_dim(config: Any) -> int | None:
    """The width of an attention head; None where there are none."""
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def _head_problem(model: PreTrainedModel) -> str:
    try:
        lm_head(model)
    except ModelError as error:
        return str(error)
    return ""
