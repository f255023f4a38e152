"""Greedy answers through transformers' own `generate`, for samples that people read; rollouts have their own engine.

Shape letters: B prompts, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kedge.core.batches import pad_tokens
from kedge.models.forward.reader import evaluating, uncompiled


@torch.no_grad()
def greedy(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop: Collection[int], pad: int
) -> list[list[int]]:
    """The most likely token at every position after each prompt, up to a stop token, which is left out."""
    tokens_BT, attention_mask_BT = pad_tokens(prompts, pad=pad, side="left")
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop), pad_token_id=pad
    )
    device = model.device
    generate: Callable[..., Tensor] = cast(Any, model).generate
    with evaluating(model), uncompiled(model):
        generated_BT = generate(
            input_ids=tokens_BT.to(device),
            attention_mask=attention_mask_BT.long().to(device),
            generation_config=settings,
        )
    return [_before_stop(row[tokens_BT.shape[1] :].tolist(), stop) for row in generated_BT]


def _before_stop(tokens: list[int], stop: Collection[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in stop), len(tokens))
    return tokens[:end]
