"""Stage `evaluate`: the answers of several models to the same fixed prompts, compared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kedge.core.settings import Section
from kedge.core.stage import Input, Stage
from kedge.pipeline.stages import words


class EvaluateSettings(Section):
    """Compare models on prompts that none of them was trained on."""

    kind: Literal["evaluate"]
    models: Annotated[list[str], Input("model")] = Field(min_length=1)
    """Models, or stages that make one; the first is the one the others are compared with."""
    prompts: Annotated[str, Input("prompts")]
    """Held-out prompts."""
    answers: int = Field(default=1, ge=1)
    """Answers a model gives to each prompt."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""


def explain(settings: EvaluateSettings) -> list[str]:
    return [f"{words.count(len(settings.models), 'model')} × {words.count(settings.answers, 'answer')} to each prompt"]


STAGE = Stage(
    summary="Answers of several models to the same prompts, compared.",
    settings=EvaluateSettings,
    makes={"evaluation": "evaluation"},
    explain=explain,
)
