"""Stage `sft`: supervised fine-tuning on demonstrations. The loss is on the assistant's tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, MixedData, ReadData, Stage, TooLong
from kedge.models.settings import AutoSize, LoraSettings, TrainingMemory, check_offload
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.shared import batch_arithmetic
from kedge.trainers.supervised import EvalSettings


class SFTSettings(Section):
    """Imitate demonstrations."""

    kind: Literal["sft"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The model to start from; the recipe's `model` when absent."""
    data: Annotated[MixedData, Input("demonstrations")]
    """Conversations to imitate: a file, or several with weights."""
    heldout: Annotated[ReadData | None, Input("demonstrations")] = None
    """Conversations for the evaluation loss; never trained on."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most optimiser steps; the learning rate falls to its end by then."""
    batch: int = Field(default=32, ge=1)
    """Conversations in one optimiser step."""
    micro_batch: Annotated[AutoSize, MayChange()] = "auto"
    """Of them in memory at once: `auto` is as many tokens as the device has room for and computes fastest, chosen at
    the start; a number is so many of them. It changes speed and memory, never the update."""
    max_length: int = Field(default=1024, ge=8)
    """Longest conversation in tokens."""
    too_long: TooLong = "drop"
    """What happens to a longer one: `refuse` starts nothing, `drop` leaves it out, `cut` takes its beginning away."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights; they are merged into the model at the end."""
    memory: TrainingMemory = TrainingMemory()
    """Types of the weights, recomputation, compilation."""
    optimiser: OptimiserSettings = OptimiserSettings()
    """AdamW and its schedule."""
    eval: EvalSettings = EvalSettings()
    """When the held-out loss is measured, and early stopping."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """How often the run is saved."""
    samples: int = Field(default=8, ge=0)
    """Fixed prompts that are answered before and after training."""
    sample_tokens: int = Field(default=64, ge=1)
    """Longest of these answers."""


def explain(settings: SFTSettings) -> list[str]:
    return batch_arithmetic.supervised(
        settings.batch, settings.micro_batch, settings.epochs, "conversation", max_steps=settings.max_steps
    )


def check(settings: SFTSettings) -> Iterator[Finding]:
    yield from check_offload("sft", settings.memory, {"optimiser": settings.optimiser})
    if settings.eval.patience is not None and settings.heldout is None:
        yield Finding(
            level="fatal",
            code="sft.patience",
            message=f"eval.patience is {settings.eval.patience}, but without `heldout` there is nothing to evaluate",
            where="eval.patience",
            fix="give `heldout`, or leave patience out",
        )


STAGE = Stage(
    summary="Supervised fine-tuning on demonstrations.",
    settings=SFTSettings,
    makes={"model": "model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_length,
    run="kedge.stages.sft.train:train",
)
