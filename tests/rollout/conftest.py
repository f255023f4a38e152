"""A small model, and a second opinion: the same rules in plain Python, one row and one token at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kedge.models.loading.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parent))  # for what stands beside the tests

_ALL = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mixed(z: int) -> int:
    """SplitMix64 as published, in integers of any size."""
    z &= _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)


def _key(seed: int, *numbers: int) -> int:
    key = _mixed(seed)
    for number in numbers:
        key = _mixed(key + (number + 1) * _GOLDEN)
    return key


def _wait(key: int, index: int) -> float:
    uniform = ((_mixed(key + (index + 1) * _GOLDEN) >> 11) + 0.5) / 2**53
    return -math.log1p(-uniform)


def _allowed(logits: Sequence[float], top_k: int | None, top_p: float) -> set[int]:
    """Likeliest first, lower ids first among equals; add one at a time until the mass is reached."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    top = max(logits)
    weights = [math.exp(logits[token] - top) for token in order]
    allowed_tokens, mass = set[int](), 0.0
    for token in order:
        if mass >= top_p * math.fsum(weights) and top_p < 1:
            break
        allowed_tokens.add(token)
        mass = math.fsum(weights[: len(allowed_tokens)])
    return allowed_tokens


def _draw(logits: Sequence[float], key: int, top_k: int | None, top_p: float) -> int:
    allowed_tokens = _allowed(logits, top_k, top_p)
    return max(allowed_tokens, key=lambda token: logits[token] - math.log(_wait(key, token)))


@torch.no_grad()
def _answer(
    model: Any,
    prompt: Sequence[int],
    *,
    key: tuple[int, int, int],
    stop_ids: Collection[int],
    max_new: int,
    min_new: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> list[int]:
    """No cache, no batch, no padding: the whole text is read again for every token. `key`: seed, group, answer."""
    answer: list[int] = []
    while len(answer) < max_new and not (answer and answer[-1] in stop_ids):
        logits = (model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, -1].double() / temperature).tolist()
        if len(answer) < min_new:
            logits = [-math.inf if token in stop_ids else logit for token, logit in enumerate(logits)]
        answer.append(_draw(logits, _key(*key, len(answer)), top_k, top_p))
    return answer


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    """Weights larger than usual, so that what a token is likely to be depends on all that is before it."""
    model = tiny_model(seed=3, hidden=32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim == 2 else 1.0)
    return model


@pytest.fixture(scope="session")
def slow_key() -> Callable[..., int]:
    return _key


@pytest.fixture(scope="session")
def slow_allowed() -> Callable[..., set[int]]:
    return _allowed


@pytest.fixture(scope="session")
def slow_answer() -> Callable[..., list[int]]:
    return _answer
