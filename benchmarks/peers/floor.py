"""The least time an update can take on a card: its operations and bytes over the rates the card shows in the same run.

A decode step reads all weights and the filled part of the cache; a forward pass multiplies every weight with every
token. Left out, so that it stays a floor: sampling, norms, losses, launches, and what does not fill the card.
Operations: 2 a weight and token forward, twice that backward; attention 2·T²·D a layer, for it is causal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ADAM_BYTES = 30
"""Bytes a weight and step: float32 weight and two moments read and written, gradient read, bfloat16 weight written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    matrix: float
    """Operations a second of a large matrix product."""
    copy: float
    """Bytes a second, read and written, of a large copy."""


def measured_rates(device: str) -> Rates:
    on_gpu = device == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(2**30 if on_gpu else 2**24, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return Rates(
        matrix=2 * size**3 / _fastest(lambda: left @ right, device),
        copy=2 * source.nbytes / _fastest(lambda: target.copy_(source), device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The counts of a model that the floor is computed from."""

    body: int
    """Parameters without embedding and head."""
    head: int
    layers: int
    width: int
    cache_bytes: int
    """Keys and values of one token, all layers."""

    @property
    def all_bytes(self) -> int:
        return 2 * (self.body + self.head)


def weights_of(config: Any) -> Weights:
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    head = config.vocab_size * config.hidden_size
    head_width = config.hidden_size // config.num_attention_heads
    return Weights(
        body=sum(parameter.numel() for parameter in model.parameters()) - head,
        head=head,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        cache_bytes=2 * config.num_hidden_layers * config.num_key_value_heads * head_width * 2,
    )


def floor(
    weights: Weights, rates: Rates, new: Sequence[int], *, prompt: int, epochs: int, minibatches: int
) -> dict[str, float]:
    """Seconds of each phase, for answers of the lengths `new` to prompts of one length."""
    new_B = torch.tensor(new, dtype=torch.float64)
    texts_B = new_B + prompt
    tokens, answered = float(texts_B.sum()), float(new_B.sum())
    body = 2 * weights.body * tokens + _attention(weights, texts_B)
    head = 2 * weights.head * answered
    reading = 2 * weights.body * prompt * len(new) + _attention(weights, torch.full_like(new_B, prompt))
    adam = ADAM_BYTES * (2 * weights.body + 2 * weights.head) * epochs * minibatches
    return {
        "generate": reading / rates.matrix + _decoding(weights, rates, new_B, prompt),
        "judge": (4 * body + 2 * head) / rates.matrix,
        "update": epochs * 3 * (2 * body + head) / rates.matrix + adam / rates.copy,
    }


def _decoding(weights: Weights, rates: Rates, new_B: Tensor, prompt: int) -> float:
    """For every step after the first token, the longer of the time to read and the time to multiply."""
    seconds = 0.0
    for num_new in range(1, int(new_B.max())):
        alive = int((new_B > num_new).sum())
        read = weights.all_bytes + alive * (prompt + num_new) * weights.cache_bytes
        products = 2 * (weights.body + weights.head) * alive
        seconds += max(read / rates.copy, products / rates.matrix)
    return seconds


def _attention(weights: Weights, length_B: Tensor) -> float:
    return 2 * weights.layers * weights.width * float((length_B**2).sum())


def _fastest(work: Callable[[], object], device: str) -> float:
    """Mean seconds over ten calls in a row, the fastest of five such series."""
    return min(_seconds(work, device) for _ in range(5))


def _seconds(work: Callable[[], object], device: str, times: int = 10) -> float:
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times
