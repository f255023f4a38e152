"""Stage `data`: the first step of a pipeline. Reads, refuses or repairs what is wrong, splits by prompt.

Nothing is dropped in silence: every example left out is written to set-aside.jsonl with its place and the reason.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kedge.core.settings import Section
from kedge.core.stage import DataFile, Input, Stage


class DataSettings(Section):
    """Prepare data: clean, decontaminate, split."""

    kind: Literal["data"]
    files: Annotated[list[str | DataFile], Input("records", several=True)] = Field(min_length=1)
    """What to read; all files must hold the same kind of examples."""
    heldout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts that is held out; an example goes where its prompt goes."""
    drop: list[Literal["empty", "identical", "contradictory", "duplicate"]] = Field(
        default_factory=lambda: ["empty", "identical", "contradictory", "duplicate"]
    )
    """What to leave out of both parts."""
    decontaminate: Annotated[list[str], Input("records", several=True)] = Field(default_factory=list)
    """Evaluation files: examples whose prompt stands in one of them are left out."""
    balance: Annotated[str | None, Field(min_length=1)] = None
    """A field of the records (language, source): in the part to train each of its values has as many examples, repeated
    where there are fewer; prompts are not repeated, but drawn equally often by the stages that answer them."""
    max_broken: float = Field(default=0.01, ge=0, le=1)
    """The largest share of unreadable lines before the stage refuses."""


def explain(settings: DataSettings) -> list[str]:
    kept, left_out = 100 * (1 - settings.heldout), ", ".join(settings.drop) or "nothing"
    return [f"{kept:g} % of the prompts to train, {100 - kept:g} % held out; left out: {left_out}"]


STAGE = Stage(
    summary="Read, clean, decontaminate and split data by prompt.",
    settings=DataSettings,
    makes={"train": "records", "heldout": "records"},
    explain=explain,
    run="kedge.stages.data.run:run",
)
