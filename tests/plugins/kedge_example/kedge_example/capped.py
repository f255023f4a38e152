"""Generator `capped`: samples in this process, and stops every answer after `tokens` tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kedge.core.settings import Section
from kedge.rollout.generators import GeneratorKind, GeneratorParts

if TYPE_CHECKING:
    from kedge.rollout.local import LocalGenerator


class CappedSettings(Section):
    kind: Literal["capped"] = "capped"
    tokens: int = Field(default=16, ge=1)
    """The longest answer, where `sampling.max_new_tokens` allows more."""


def make(settings: CappedSettings, parts: GeneratorParts) -> LocalGenerator:
    from kedge.rollout.local import LocalGenerator  # torch, which a recipe that is only checked need not wait for

    longest = min(settings.tokens, parts.sampling.max_new_tokens)
    return LocalGenerator(
        parts.model,
        parts.sampling.model_copy(update={"max_new_tokens": longest}),
        stop_ids=parts.stop_ids,
        pad=parts.pad,
        max_rows=parts.max_rows,
        decode=parts.decode,
    )


CAPPED = GeneratorKind(settings=CappedSettings, make=make)
