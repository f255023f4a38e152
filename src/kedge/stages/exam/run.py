"""The stage: models from the recipe, exams by name, files into the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kedge.exams.catalogue import expanded
from kedge.stages.exam.files import table_lines, write_exams
from kedge.stages.exam.settings import ExamSettings
from kedge.stages.exam.take import Request, take_exams
from kedge.stages.shared.context import Context

_QUIET_S = 30.0


def run(context: Context, settings: ExamSettings) -> Mapping[str, Path]:
    """Ask, grade, summarise, write; returns the file that other stages may read."""
    request = Request(
        exams=tuple(_placed(name, context.recipe_folder) for name in expanded(settings.exams)),
        template=settings.template,
        limit=settings.limit,
        seed=context.seed,
        rows=settings.rows,
        dtype=settings.dtype,
        device=context.device,
        chat_template=context.chat_template,
        world=context.world,
        say=context.say,
        progress=_Progress(context),
    )
    taken = take_exams(list(zip(settings.models, context.inputs("models"), strict=True)), request)
    for line in table_lines(taken):
        context.say(f"  {line}")
    return context.once(lambda: {"exam": write_exams(context.folder, taken)})


def _placed(name: str, folder: Path) -> str:
    """An own exam lies beside the recipe; other names as they are."""
    return str(folder / name) if name.endswith((".yaml", ".yml")) else name


class _Progress:
    """A line on the screen about the questions that are under way, but not more often than every `_QUIET_S`."""

    def __init__(self, context: Context) -> None:
        self._context, self._since = context, time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._since >= _QUIET_S:
            self._since = time.monotonic()
            self._context.say(f"  {done:,} questions")
