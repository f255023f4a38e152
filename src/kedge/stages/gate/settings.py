"""Stage `gate`: a candidate against its baseline, by rules, with the badcases replayed; a verdict that is sealed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.settings import PathText, Section
from kedge.core.stage import Input, MayChange, Stage
from kedge.models.settings import AutoSize


class GateSettings(Section):
    """Decide whether a model may go out. The run ends with exit code 3 where it may not."""

    kind: Literal["gate"]
    candidate: Annotated[str, Input("model")]
    """The model that should go out: a stage, or a folder."""
    baseline: Annotated[str, Input("model")]
    """The model that it must not be worse than."""
    sources: Annotated[list[str], Input("evaluation")] = Field(alias="from", min_length=1)
    """Stages of kind `exam` and `evaluate` that have asked both models, or the folders of such stages."""
    rules: Annotated[str, Input("rules")] = "gate.yaml"
    """The file of rules (`kedge gate --write-rules gate.yaml` writes one)."""
    undecided: Literal["block", "allow"] = "block"
    """Whether a verdict that the data do not decide ends the run too."""
    reserved: bool = False
    """Decide by the items that the rules keep back for a promotion (`reserve`)."""
    badcases: PathText = "badcases"
    """The folder of badcases, which the candidate answers."""
    ledger: PathText = "models/looks.jsonl"
    """The file in which every look of a lineage at an exam is counted."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer to a badcase."""
    temperature: float = Field(default=1.0, ge=1e-6)
    """Of the answers to badcases."""
    rows: Annotated[AutoSize, MayChange()] = "auto"
    """Answers sampled at once; it changes speed and memory, never an answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights while they answer; `auto` is float32 on a CPU, bfloat16 on a GPU."""


def explain(settings: GateSettings) -> list[str]:
    ends = "a fail ends the run with exit code 3"
    if settings.undecided == "block":
        ends = "a fail and what is undecided end the run with exit code 3"
    return [
        f"{settings.candidate} against {settings.baseline} by {settings.rules}, from {', '.join(settings.sources)}",
        f"badcases of {settings.badcases}/ are replayed; {ends}",
    ]


def check(settings: GateSettings) -> Iterator[Finding]:
    if settings.candidate == settings.baseline:
        yield Finding(
            level="fatal",
            code="gate.models",
            message=f"{settings.candidate} is compared with itself",
            where="candidate",
            fix="name the model that it was trained from as baseline",
        )


STAGE = Stage(
    summary="May the candidate go out? Rules, badcases, a sealed verdict.",
    settings=GateSettings,
    makes={"verdict": "verdict"},
    explain=explain,
    check=check,
    run="kedge.stages.gate.run:run",
)
