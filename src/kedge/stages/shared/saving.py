"""A trained policy saved: the whole model, its adapter beside it, and what rounding takes away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kedge.models.loading.start import rounded_away, save_causal
from kedge.models.settings import SaveDType
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MUCH = 0.1
"""The share of the update above which its loss is a warning."""


def save_policy(
    context: Context,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: Mapping[str, Tensor] | None = None,
    dtype: SaveDType = "float32",
) -> Path:
    """`model/` in the stage's folder, and `adapter/` beside it where adapters were trained.

    `weights` are the float32 masters of trained weights by the names of their parameters.
    """
    folder = context.folder / "model"
    tell_rounding(context, model, weights, dtype)
    return save_causal(model, tokenizer, folder, weights=weights, dtype=dtype)


def tell_rounding(
    context: Context, model: PreTrainedModel, weights: Mapping[str, Tensor] | None, dtype: SaveDType
) -> None:
    """Say how much of what was learnt is lost where the model is saved in bfloat16."""
    lost = rounded_away(model, weights) if dtype == "bfloat16" else None
    if lost is None:
        return
    level = "warning" if lost > _MUCH else "info"
    message = f"saved in bfloat16: {lost:.1%} of the entries of the update are too small for it and are lost"
    context.event(level, "save.rounded", message, fix="memory.save_dtype: float32 keeps them", share=lost)
