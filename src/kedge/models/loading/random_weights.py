"""Random weights of the shape of a model whose own are not here: for measuring memory and speed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kedge.core.errors import ModelError
from kedge.models.loading.load import explain


def write_random(model: str, folder: Path) -> Path:
    """A model folder with the configuration and the tokenizer of `model`, and random weights in bfloat16."""
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(explain(model, error)) from error
    torch.manual_seed(0)
    random = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.bfloat16)
    random.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
