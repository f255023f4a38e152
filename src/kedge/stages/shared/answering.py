"""Settings of stages that draw answers of models to prompts, once. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kedge.core.settings import Section
from kedge.core.stage import MayChange, TooLong
from kedge.models.settings import AutoSize


class AnsweringSettings(Section):
    """How long prompts and answers may be, how answers are drawn, and how many at once."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt; what the windows of the models leave beside the longest answer, when absent."""
    too_long: TooLong = "refuse"
    """What happens to a longer one: `refuse` starts nothing, `drop` leaves it out, `cut` takes its beginning away."""
    temperature: float = Field(default=1.0, ge=1e-6)
    """Of sampling, and of the log-probabilities behind a KL."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of likeliest tokens with at least this mass; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Keep so many of the likeliest tokens; 1 always takes the likeliest."""
    rows: Annotated[AutoSize, MayChange()] = "auto"
    """Answers sampled at once; `auto` is as many as have room. It changes speed and memory, never an answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights while they answer; `auto` is float32 on a CPU, bfloat16 on a GPU."""
