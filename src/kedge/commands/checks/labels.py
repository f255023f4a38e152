"""The arithmetic of labels: how many comparisons a recipe asks people for, and how many hours that is; or judges, and
how many calls, tokens and dollars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import comb
from pathlib import Path
from typing import Any

from kedge.commands.checks.records import Asked, Checked
from kedge.commands.checks.rewards import ask_judge, asked_once
from kedge.core.errors import KedgeError
from kedge.core.files import cache_root
from kedge.core.findings import Finding
from kedge.data.sources import rows
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Plan
from kedge.rewards.context import RewardContext
from kedge.rewards.spending.tokens import BYTES_A_TOKEN, Tokens
from kedge.stages.label.judging import Ready, open_judge, pairs_of, read_tasks
from kedge.stages.label.settings import Judge, LabelSettings, People
from kedge.stages.shared.people import open_people
from kedge.stages.tasks.settings import TasksSettings

SECONDS = 60.0
"""A label, where nobody has given one yet."""
_SAMPLE = 200
"""Prompts whose length stands for that of all."""


def label_lines(name: str, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Of a stage `label`: tasks, labels, hours of people or calls of judges, as far as they can be known before it
    runs."""
    settings = recipe.stages[name]
    if not isinstance(settings, LabelSettings):
        return
    if settings.people is None:
        yield from _judge_lines(name, settings, recipe, plan)
        return
    tasks = _tasks(name, recipe, plan)
    if tasks is None:
        return
    labels = round(tasks * settings.people.mean_labels())
    seconds, pay = _usual(settings.people, recipe.file.parent)
    known = "the median so far" if seconds is not None else "assumed: nobody has labelled yet"
    hours = labels * (seconds or SECONDS) / 3600
    cost = f", {hours * pay[0]:,.0f} {pay[1]}".rstrip() if pay[0] else ""
    each = f"{seconds or SECONDS:.0f} s each, {known}"
    yield f"{tasks:,} tasks, about {labels:,} labels: {hours:,.1f} h of people{cost} ({each})"


def label_judges(name: str, recipe: Recipe, *, offline: bool) -> Iterator[tuple[Checked, tuple[Finding, ...]]]:
    """The judges of a stage `label`: trust, constitution and rubric, and whether they answer. Their replies are kept,
    so that a run that is checked again pays nothing for it."""
    settings = recipe.stages[name]
    if not isinstance(settings, LabelSettings):
        return
    for judge in settings.judges:
        asked = Asked(prompts=None, total=0, longest=None)
        outcome = ask_judge(asked_once(judge), lambda once: _opened(once, recipe).panelist, asked, offline=offline)
        findings = tuple(replace(finding, where=f"{name}.by") for finding in outcome.findings)
        yield (
            Checked(what=outcome.what, subject=outcome.subject, result=outcome.result, used_by=(f"{name}.by",)),
            findings,
        )


def _opened(judge: Judge, recipe: Recipe) -> Ready:
    known = RewardContext(folder=recipe.file.parent, seed=recipe.settings.seed)
    cache = cache_root() / "judge"
    return open_judge(judge, known, cache=cache, ledger=cache / "checks.jsonl")


def _judge_lines(name: str, settings: LabelSettings, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """What judges are asked and what that costs: of tasks that are there exactly, of others about."""
    (link,) = (link for link in plan.links[name] if link.field == "data")
    try:
        tasks = None if link.stage else read_tasks(link.source())
    except (KedgeError, OSError):
        return  # what is wrong with the file is told where it is read
    for judge in settings.judges:
        try:
            ready = _opened(judge, recipe)
        except KedgeError:
            continue  # told as a finding
        if tasks is not None:
            pairs, _ = pairs_of(ready, *tasks, seed=recipe.settings.seed)
            estimate = ready.panelist.estimate(pairs, samples=judge.votes)
            yield f"{judge.label}: {len(pairs):,} comparisons × 2 orders × {judge.votes} votes: {estimate.in_words()}"
        elif (known := _planned(name, recipe, plan)) is not None:
            comparisons, bytes_shown = known
            calls = 2 * judge.votes * comparisons
            sent = round(calls * (len(ready.panelist.rubric) + bytes_shown) / BYTES_A_TOKEN)
            tokens = Tokens(prompt=sent, completion=calls * judge.max_tokens)
            usd = tokens.usd(judge.budget)
            cost = f", up to about {usd:,.2f} USD" if usd else ""
            yield (
                f"{judge.label}: {comparisons:,} comparisons × 2 orders × {judge.votes} votes: {calls:,} calls, up to "
                f"about {tokens.prompt:,} tokens sent and {tokens.completion:,} replied{cost}"
            )


def _planned(name: str, recipe: Recipe, plan: Plan) -> tuple[int, float] | None:
    """How many comparisons a stage `tasks` will make, and the bytes of a prompt and two answers in one; None where only
    the run will tell."""
    tasks = _tasks(name, recipe, plan)
    (link,) = (link for link in plan.links[name] if link.field == "data")
    made_by = recipe.stages[link.stage] if link.stage else None
    if tasks is None or not isinstance(made_by, TasksSettings):
        return None
    answers = len(made_by.models) * made_by.answers
    each = comb(answers, 2) if made_by.ask == "rank" else 1
    prompts = [link.source() for link in plan.links[link.stage] if link.field == "prompts" and not link.stage]
    sizes = [len(str(row.fields or "")) for source in prompts for row in islice(rows(source), _SAMPLE)]
    prompt = sum(sizes) / len(sizes) if sizes else 0.0
    return tasks * each, prompt + 2 * BYTES_A_TOKEN * made_by.max_new_tokens


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


def _usual(people: People, folder: Path) -> tuple[float | None, tuple[float, str]]:
    """The median seconds of a label in the project so far, and what an hour is paid; nothing without a project."""
    nothing: tuple[Any, tuple[float, str]] = (None, (0.0, ""))
    address = people.address(folder)
    if "://" in address or not Path(address).is_file():
        return nothing  # a server is not asked before the run
    try:
        with open_people(address) as store:
            from kedge.label.projects import find_project
            from kedge.label.status import status

            project = find_project(store, people.project)
            return status(store, project).seconds, (project.settings.pay, project.settings.currency)
    except KedgeError:
        return nothing
