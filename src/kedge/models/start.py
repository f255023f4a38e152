"""A causal model made ready to learn, and saved when it has learnt."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.models.adapters import Module, merge, with_lora
from kedge.models.load import load_causal, no_bars
from kedge.models.reward_files import whole_folder
from kedge.models.settings import LoraSettings


def start_causal(source: str, *, lora: LoraSettings | None, device: str, seed: int) -> Module:
    """All weights of a model, or adapters on a frozen base.

    Weights that learn are float32, whatever they multiply in: in bfloat16 small updates would be rounded away.
    """
    if lora is None:
        return load_causal(source, dtype="float32", device=device)
    return with_lora(load_causal(source, device=device), lora, name="policy", seed=seed)


def save_causal(model: Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Write a whole model in the Hugging Face layout, adapters merged in; `folder` appears when it is complete."""
    plain: PreTrainedModel = merge(model) if isinstance(model, PeftModel) else model

    with whole_folder(folder) as beside, no_bars():
        plain.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    return folder
