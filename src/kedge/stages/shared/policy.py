"""The policy that a stage trains: opened with what learns of it, and saved, its adapter beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kedge.core.errors import ConfigError
from kedge.models.forward.heads import LanguageModel, language_model
from kedge.models.forward.parts import num_copies, num_parts
from kedge.models.forward.sharding import reading_note, shard_model
from kedge.models.loading.load import dtype_for
from kedge.models.loading.start import rounded_away, save_causal, start_causal
from kedge.models.settings import LoraSettings, SaveDType, TrainingMemory
from kedge.models.training.train_step import TrainedWeights, trained_weights
from kedge.stages.shared.context import Context
from kedge.stages.shared.device import pick_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MUCH = 0.1
"""The share of the update above which its loss is a warning."""


def start_policy(
    context: Context, lora: LoraSettings | None, memory: TrainingMemory, *, keeps_dropout: bool = True
) -> tuple[PreTrainedModel, TrainedWeights, LanguageModel]:
    """The model at `from`: itself, its weights that learn, and what gives its log-probs."""
    device = pick_device(context.device)
    model = start_causal(
        context.input("from"),
        lora=lora,
        device=device,
        seed=context.seed,
        keeps_dropout=keeps_dropout,
        memory=memory,
        unread=context.world.mesh is not None,
    )
    dtype = dtype_for(memory.dtype, device)
    tell_offload(context, memory)
    shard(context, model, dtype, compiled=memory.compiles_on(device))
    trained = trained_weights(model, dtype=dtype, on_host="optimiser" in memory.offloads_on(device))
    return model, trained, language_model(model, compiled=memory.compiles_on(device))


def tell_offload(context: Context, memory: TrainingMemory) -> None:
    """An event that says what is moved to the host's memory."""
    if not memory.offload:
        return
    refuse_sharded_offload(context, memory)
    names = ", ".join(memory.offload)
    is_moved = bool(memory.offloads_on(pick_device(context.device)))
    where = "in the host's memory between turns" if is_moved else "on a CPU there is nowhere to move it, so it stays"
    context.event("info", "memory.offload", f"{names}: {where}")


def refuse_sharded_offload(context: Context, memory: TrainingMemory) -> None:
    if memory.offload and context.world.mesh is not None:
        raise ConfigError(
            f"stages.{context.name}.memory.offload: sharded weights are not moved to the host; leave it out, or use "
            "placement.weights: replicate"
        )


def shard(
    context: Context,
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    compiled: bool,
    whole: Collection[nn.Parameter] = (),
) -> None:
    """Leave this process its part of the model that learns, where the recipe says so; `whole` is not cut."""
    if context.world.mesh is not None:
        shard_model(model, context.world.mesh, dtype=dtype, whole=whole)
        tell_sharding(context, model, compiled=compiled)


def tell_sharding(context: Context, model: PreTrainedModel, *, compiled: bool) -> None:
    """An event that says how the weights are cut, and what that leaves out; one more where they were read otherwise
    than each process its part."""
    on_gpu = model.device.type == "cuda"
    mesh = context.world.mesh
    parts, copies = num_parts(mesh), num_copies(mesh)
    message = f"weights that learn are held in {parts} part{'' if parts == 1 else 's'}"
    message += f", each by {copies} processes" if copies > 1 else ""
    message += "; layers run without CUDA graphs" if on_gpu and compiled else ""
    context.event("info", "placement.shard", message)
    if note := reading_note(model):
        context.event("info", "placement.shard_read", note)


def save_policy(
    context: Context,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: Mapping[str, Tensor],
    dtype: SaveDType,
) -> Path:
    """`model/` in the stage's folder, and `adapter/` beside it where adapters were trained.

    `weights` are the float32 masters of trained weights by the names of their parameters.
    """
    tell_rounding(context, model, weights, dtype)
    folder = context.folder / "model"
    return save_causal(model, tokenizer, folder, weights=weights, dtype=dtype, world=context.world)


def tell_rounding(context: Context, model: PreTrainedModel, weights: Mapping[str, Tensor], dtype: SaveDType) -> None:
    """Say how much of what was learnt is lost where the model is saved in bfloat16."""
    lost = rounded_away(model, weights) if dtype == "bfloat16" else None
    if lost is None:
        return
    level = "warning" if lost > _MUCH else "info"
    message = f"saved in bfloat16: {lost:.1%} of the entries of the update are too small for it and are lost"
    context.event(level, "save.rounded", message, fix="memory.save_dtype: float32 keeps them", share=lost)
