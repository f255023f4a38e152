"""The arithmetic of rounds: which stages are done how often, and what that asks of people and judges in all."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.commands.checks.labels import label_lines
from kedge.core.findings import Finding
from kedge.recipe.round_rules import weight_of_age
from kedge.recipe.rounds import DRIFT, Rounds
from kedge.recipe.wiring import connect
from kedge.stages.shared.batch_arithmetic import count
from kedge.stages.tasks.settings import TasksSettings


def round_lines(rounds: Rounds) -> Iterator[str]:
    """What every round does, what is done once, and what all rounds together ask for."""
    settings = rounds.settings
    yield f"{settings.count} rounds, each: {', '.join((*rounds.repeated, DRIFT))}"
    if rounds.once:
        yield f"once, in round 1, because nothing of an earlier round goes into it: {', '.join(rounds.once)}"
    for stage, begun in settings.first.items():
        yield f"previous.{stage} in round 1: {'nothing' if begun is None else begun}"
    yield from _label_totals(rounds)
    keep = settings.keep
    if keep.pairs == "all" and rounds.labelled():
        last = settings.count - 1
        weight = weight_of_age(last, keep.weight_halves_after)
        learners = ", ".join(rounds.labelled())
        yield f"{learners}: labels of all rounds so far; those of round 1 count {weight:.2f} in the last"
    compared = [name for name in (rounds.policy, rounds.reward) if name]
    yield f"{' and '.join(compared)} are compared with those of the round before; the best round is kept, not the last"


def _label_totals(rounds: Rounds) -> Iterator[str]:
    """What is asked of people and judges: in a round, and in all."""
    recipe, times = rounds.recipe(2), rounds.settings.count
    plan = connect(recipe)
    for name in rounds.repeated:
        stage = recipe.stages[name]
        if isinstance(stage, TasksSettings) and stage.number is not None:
            total = count(times * stage.number, "task")
            yield f"{name}: {times} rounds × {count(stage.number, 'task')} = {total} in all"
        for line in label_lines(name, recipe, plan):
            yield f"{name}, {times} times: {line}"


def later_findings(name: str, rounds: Rounds) -> Iterator[Finding]:
    """What is wrong with the settings of a stage in later rounds, and was not in the first."""
    first, later = rounds.recipe(1), rounds.recipe(2)
    known = {(finding.code, finding.where) for finding in first.kinds[name].check(first.stages[name])}
    for finding in later.kinds[name].check(later.stages[name]):
        if (finding.code, finding.where) not in known:
            yield finding
