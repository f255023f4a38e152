"""Settings of an optimiser, and its learning rate at every step."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from pydantic import Field, model_validator

from kedge.core.settings import Section

EIGHT_BIT_PACKAGES: Final = ("bitsandbytes", "torchao")
"""Packages with an AdamW of 8 bits, the first that is installed being used."""

Per = Literal["token", "sequence", "sequence_sum", "constant"]
"""What a loss is a mean over: all tokens alike; the mean of sequence means; the mean of sequence sums; the sum over a
fixed number of tokens."""


class OptimiserSettings(Section):
    """AdamW with warm-up and decay."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits (Dettmers et al. 2022): 2 bytes a weight instead of 8. It needs
    bitsandbytes or torchao."""
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

    @model_validator(mode="after")
    def _is_installed(self) -> OptimiserSettings:
        if self.name == "adamw_8bit" and eight_bit_package() is None:
            raise ValueError(
                "name is adamw_8bit, which needs bitsandbytes or torchao, and neither is installed: pip install "
                "bitsandbytes, or leave name out (adamw)"
            )
        return self


def eight_bit_package() -> str | None:
    """The installed package that AdamW in 8 bits comes from; None where there is none."""
    return next((name for name in EIGHT_BIT_PACKAGES if find_spec(name) is not None), None)
