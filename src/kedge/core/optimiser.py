"""Settings of an optimiser, and its learning rate at every step."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from kedge.core.settings import Section


class OptimiserSettings(Section):
    """AdamW with warm-up and decay."""

    lr: float = Field(default=2e-5, gt=0)
    """Peak learning rate. LoRA adapters want about ten times that of full training."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Share of all steps over which the rate rises from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient; a larger one is scaled down to it."""


def learning_rate(settings: OptimiserSettings, step: int, total: int) -> float:
    """The rate of step `step` (counted from 1) out of `total`: a straight rise, then the schedule down to zero.

    >>> half = OptimiserSettings(lr=1.0, schedule="linear", warmup=0.5)
    >>> [learning_rate(half, step, 4) for step in (1, 2, 3, 4)]
    [0.5, 1.0, 1.0, 0.5]
    >>> learning_rate(OptimiserSettings(lr=1.0, schedule="cosine", warmup=0.0), 3, 4)
    0.5
    """
    # Rounded first: 0.07 · 100 is a little more than 7 in binary, and would make 8 steps.
    rising = math.ceil(round(settings.warmup * total, 9))
    if step <= rising:
        return settings.lr * step / rising
    progress = (step - rising - 1) / max(1, total - rising)
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - progress)
        case "cosine":
            return settings.lr * (1 + math.cos(math.pi * progress)) / 2
