"""Settings of an optimiser, and its learning rate at every step."""

from __future__ import annotations

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
