"""Settings of sampling. Free of torch, so that a recipe is checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from kedge.core.settings import Section

_PARTIAL: Final = frozenset({"partial", "partial_rollouts", "partial_rollout", "in_flight", "in_flight_updates"})
"""What other tools call an answer that goes on under new weights."""


class StreamSettings(Section):
    """What the settings of a generator have that may sample ahead of the policy."""

    lag: int = Field(default=0, ge=0, le=64)
    """Batches that are sampled ahead: the answers of a batch are at most so many versions of the policy old. 0 is
    strictly on-policy."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_partial_rollouts(cls, given: Any) -> Any:
        names = sorted(_PARTIAL & given.keys()) if isinstance(given, Mapping) else []
        if names:
            raise ValueError(
                f"{names[0]}: answers that go on under new weights (partial rollouts) are not there: every answer is "
                "of one version of the weights, by which it is corrected; `lag` samples whole batches ahead"
            )
        return given


def lag_of(generator: Section) -> int:
    """How far ahead a generator may sample; one without such a setting never does."""
    return generator.lag if isinstance(generator, StreamSettings) else 0


class SamplingSettings(Section):
    """How an answer is drawn: temperature first, then `top_k`, then `top_p` of what is left."""

    temperature: float = Field(default=1.0, ge=1e-6)
    """Divides the logits, for sampling and for log-probabilities alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of likeliest tokens with at least this mass; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep so many of the likeliest tokens; 1 always takes the likeliest."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Stop tokens are forbidden, and stop strings do not count, until an answer has so many tokens."""
    max_new_tokens: int = Field(default=256, ge=1)
    """An answer is cut at so many tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """An answer that contains one of these strings ends with the token that completed it."""

    @model_validator(mode="after")
    def _minimum_fits_maximum(self) -> SamplingSettings:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self
