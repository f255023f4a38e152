"""The arithmetic of labels: how many comparisons a recipe asks people for, and how many hours that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kedge.core.errors import KedgeError
from kedge.data.sources import rows
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Plan
from kedge.stages.label.settings import LabelSettings
from kedge.stages.shared.people import open_people
from kedge.stages.tasks.settings import TasksSettings

SECONDS = 60.0
"""A label, where nobody has given one yet."""


def label_lines(name: str, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Of a stage that people label in: tasks, labels and hours, as far as they can be known before it runs."""
    settings = recipe.stages[name]
    if not isinstance(settings, LabelSettings):
        return
    tasks = _tasks(name, recipe, plan)
    if tasks is None:
        return
    labels = round(tasks * settings.by.mean_labels())
    seconds, pay = _usual(settings, recipe.file.parent)
    known = "the median so far" if seconds is not None else "assumed: nobody has labelled yet"
    hours = labels * (seconds or SECONDS) / 3600
    cost = f", {hours * pay[0]:,.0f} {pay[1]}".rstrip() if pay[0] else ""
    each = f"{seconds or SECONDS:.0f} s each, {known}"
    yield f"{tasks:,} tasks, about {labels:,} labels: {hours:,.1f} h of people{cost} ({each})"


def _tasks(name: str, recipe: Recipe, plan: Plan) -> int | None:
    """How many tasks a stage is given; None where only the run will tell."""
    (link,) = (link for link in plan.links[name] if link.field == "data")
    if not link.stage:
        return _count([link.source()])
    made_by = recipe.stages[link.stage]
    if not isinstance(made_by, TasksSettings):
        return None
    if made_by.number is not None:
        return made_by.number
    prompts = [link for link in plan.links[link.stage] if link.field == "prompts"]
    return None if any(link.stage for link in prompts) else _count([link.source() for link in prompts])


def _count(sources: Sequence[str]) -> int | None:
    try:
        return sum(1 for source in sources for _ in rows(source))
    except (KedgeError, OSError):
        return None  # what is wrong with the file is told where it is checked


def _usual(settings: LabelSettings, folder: Path) -> tuple[float | None, tuple[float, str]]:
    """The median seconds of a label in the project so far, and what an hour is paid; nothing without a project."""
    nothing: tuple[Any, tuple[float, str]] = (None, (0.0, ""))
    address = settings.by.address(folder)
    if "://" in address or not Path(address).is_file():
        return nothing  # a server is not asked before the run
    try:
        with open_people(address) as store:
            from kedge.label.projects import find_project
            from kedge.label.status import status

            project = find_project(store, settings.by.project)
            return status(store, project).seconds, (project.settings.pay, project.settings.currency)
    except KedgeError:
        return nothing
