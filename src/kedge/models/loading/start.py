"""Causal language models before and after training: loaded with what is trainable, frozen in part, and saved."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.core.errors import ModelError
from kedge.core.files import fsync_folder, run_errors
from kedge.models.forward.lora import Module, base_of, is_quantised, merge, merge_anew, with_lora
from kedge.models.forward.reader import compile_layers
from kedge.models.loading.load import load_causal, no_bars
from kedge.models.settings import LoraSettings, SaveDType, TrainingMemory

ENSEMBLE = "ensemble.json"
_PLAIN = TrainingMemory()


def start_causal(
    source: str,
    *,
    lora: LoraSettings | None,
    device: str,
    seed: int,
    keeps_dropout: bool = True,
    memory: TrainingMemory = _PLAIN,
) -> Module:
    """A model of which all weights are trainable, or, with `lora`, the adapters on a frozen base; in evaluation mode.

    Without `keeps_dropout` the model's own dropout is off; that of the adapters is in their settings. Trainable weights
    are float32, whatever type the forward pass computes in: in bfloat16 small updates would be rounded away.
    """
    base = (
        load_causal(source, dtype=memory.dtype, device=device, bits=lora.base_bits)
        if lora
        else load_causal(source, dtype="float32", device=device)
    )
    if not keeps_dropout:
        without_dropout(base)
    model = with_lora(base, lora, name="policy", seed=seed) if lora else base
    prepare_layers(model, compiled=memory.compiles_on(device), recomputes=memory.recompute)
    return model.eval()


def prepare_layers(model: Module, *, compiled: bool, recomputes: bool) -> None:
    """Compile the layers, and recompute their activations in the backward pass of a model in training mode."""
    if compiled:
        compile_layers(base_of(model))
    if recomputes:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": False})


def without_dropout(model: nn.Module) -> None:
    """Turn dropout off for good: where log-probs are compared, two computations of them must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Some modules have no layer for it but a number: `attention_dropout`, `residual_dropout`, `hidden_dropout`, …
        shares = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in shares:
            setattr(module, name, 0.0)


def freeze_lowest(model: PreTrainedModel, count: int) -> None:
    """Freeze the embeddings and the lowest `count` transformer blocks; with 0, nothing is frozen."""
    if not count:
        return
    blocks = blocks_of(model)
    if count >= len(blocks):
        raise ModelError(
            f"frozen_layers is {count}, but {model.name_or_path} has {len(blocks)} transformer blocks and one at least "
            f"must learn; use 0 to {len(blocks) - 1}"
        )
    decoder = cast(nn.Module, model.get_decoder())
    embeddings = [child for child in decoder.children() if isinstance(child, nn.Embedding)]
    for module in (*embeddings, *blocks[:count]):
        module.requires_grad_(False)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks, lowest first."""
    decoder, count = cast(nn.Module, model.get_decoder()), model.config.get_text_config().num_hidden_layers
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ModelError(f"{type(decoder).__name__}: no list of its {count} transformer blocks was found in it")


def save_causal(
    model: Module, tokenizer: PreTrainedTokenizerBase, folder: Path, *, dtype: SaveDType = "float32"
) -> Path:
    """Save a whole model in the Hugging Face layout, adapters merged in; `folder` appears when it is complete."""
    plain = _merged(model) if isinstance(model, PeftModel) else model
    if dtype == "bfloat16":
        plain = copy.deepcopy(plain).bfloat16()
    with whole_folder(folder) as partial, no_bars():
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder


def _merged(model: PeftModel) -> PreTrainedModel:
    return merge_anew(model, load_causal(str(base_of(model).name_or_path))) if is_quantised(model) else merge(model)


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """A partial folder to write into, which replaces `folder` at the end and is deleted on an error.

    A reader never sees half a model. Only a model may be replaced: a folder with anything else in it is refused.
    """
    if folder.exists() and not any((folder / name).is_file() for name in ("config.json", ENSEMBLE)):
        raise ModelError(f"{folder} exists and holds no model, so it is not replaced; give another folder")
    partial, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    for left_by_a_kill in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    try:
        with run_errors("write", folder):
            partial.mkdir(parents=True)
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    fsync_folder(folder.parent)
