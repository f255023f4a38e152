"""One answer of one model, with what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    model: str
    prompt: int
    """Which of the prompts it answers; all models answer the same ones."""
    number: int
    """Which answer of the model to this prompt: 0, 1, …"""
    tokens: tuple[int, ...]
    """What was said, without the token that ended it."""
    text: str
    is_finished: bool
    scores: Mapping[str, float]
    """By source (`reward`, `gold`); NaN where the source gave no score."""
    kl: float | None = None
    """log p(answer | the model) − log p(answer | the baseline) in nats; None where it cannot be told."""
