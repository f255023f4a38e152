"""Stage `exam`: exams with known answers, taken by several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, Stage
from kedge.exams.exam import Template
from kedge.models.settings import AutoSize
from kedge.stages.shared.batch_arithmetic import count


class ExamSettings(Section):
    """Put the same questions with known answers to several models."""

    kind: Literal["exam"]
    models: Annotated[list[str], Input("model", "reward_model")] = Field(min_length=1)
    """Models, or stages that make one. Reward models are asked for scores, language models for everything else."""
    exams: list[str] = Field(default=["quick"], min_length=1)
    """Names (`kedge exam list`), sets of them, YAML files of your own, `lm_eval:TASK` or `inspect:TASK`."""
    template: Template = "chat"
    """How questions are written: with the chat template of the model, or as plain text; the same for all models."""
    limit: int | None = Field(default=None, ge=1)
    """Take so many items of each exam, at even distances; all, when absent."""
    rows: Annotated[AutoSize, MayChange()] = "auto"
    """Rows computed at once; `auto` is as many as have room. It changes speed and memory, never an answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights while they answer; `auto` is float32 on a CPU, bfloat16 on a GPU."""


def explain(settings: ExamSettings) -> list[str]:
    part = "" if settings.limit is None else f", at most {settings.limit:,} items of each"
    return [f"{count(len(settings.models), 'model')} × {', '.join(settings.exams)}{part}"]


def check(settings: ExamSettings) -> Iterator[Finding]:
    from kedge.core.errors import KedgeError
    from kedge.exams.catalogue import expanded, is_engine, open_exam

    twice = sorted({name for name in settings.models if settings.models.count(name) > 1})
    if twice:
        yield Finding(
            level="fatal",
            code="exam.models",
            message=f"{', '.join(twice)}: named more than once, and results are told apart by these names",
            where="models",
            fix="name each model once",
        )
    try:
        for name in expanded(settings.exams):
            # A file of one's own lies beside the recipe, whose folder is known only when the stage runs.
            if not is_engine(name) and not name.endswith((".yaml", ".yml")):
                open_exam(name, limit=settings.limit)
    except KedgeError as error:
        yield Finding(level="fatal", code="exam.exams", message=str(error), where="exams")


STAGE = Stage(
    summary="Questions with known answers, put to several models.",
    settings=ExamSettings,
    makes={"exam": "evaluation"},
    explain=explain,
    check=check,
    run="kedge.stages.exam.run:run",
)
