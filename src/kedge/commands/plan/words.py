"""A plan in words and aligned columns: what `kedge plan` prints, and what the studio shows beside a form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kedge.commands.plan.probe import Probed
from kedge.core.errors import KedgeError
from kedge.plan.machines import GIB, Machine, find_machine
from kedge.plan.memory import RoleBytes
from kedge.plan.plan import Cost, Plan, StagePlan, plan_recipe
from kedge.plan.simulate import Simulated
from kedge.recipe.schema import Recipe

_ROLE: Final = ("role", "weights", "gradients", "optimiser", "activations", "cache", "logits")
_WAY: Final = ("way", "fits", "peak GiB", "s/step", "time", "cost")


def plan_panel(recipe: Recipe) -> list[tuple[str, list[str]]]:
    """The plan of a recipe on this machine as headings with their lines; why there is none, where there is none."""
    try:
        plan = plan_recipe(recipe, find_machine(None))
    except KedgeError as error:
        return [("takes", [str(error)])]
    verdict = "fits" if plan.fits else "does not fit: kedge plan proposes what does"
    total = [f"on {machine_in_words(plan.machine)}: {total_in_words(plan)}; {verdict}", *plan.notes]
    stages = [(f"{stage.name} takes", _panel_lines(stage, plan.machine)) for stage in plan.stages]
    return [("takes", total), *((title, lines) for title, lines in stages if lines)]


def _panel_lines(stage: StagePlan, machine: Machine) -> list[str]:
    """Tables are lines that begin with spaces."""
    roles = columns([_ROLE, *(_role_row(role) for role in stage.memory.roles)]) if stage.memory.roles else ()
    tables = {*roles}
    told = [f"  {line}" if line in tables else line for line in stage_lines(stage, machine)]
    return [*told, *(f"  {line}" for line in way_lines(stage))]


def machine_in_words(machine: Machine) -> str:
    """
    >>> machine_in_words(Machine(name="h200", kind="cuda", memory=2**37, flops=1, bandwidth=1, watts=1, gpus=2))
    '2 × h200 of 128.0 GiB'
    """
    count = f"{machine.gpus} × " if machine.gpus > 1 else ""
    price = f", ${machine.price:g} an hour each" if machine.price is not None else ""
    return f"{count}{machine.name} of {gib(machine.memory)} GiB{price}"


def stage_lines(stage: StagePlan, machine: Machine) -> Iterator[str]:
    """Memory, time and cost of a stage."""
    if stage.memory.roles:
        yield from columns([_ROLE, *(_role_row(role) for role in stage.memory.roles)])
        verdict = "fits" if stage.fits else f"does not fit into {gib(machine.memory)} GiB"
        yield f"peak {gib(stage.memory.peak)} GiB while {stage.memory.at}{_passes(stage)}: {verdict}"
    steps = f", {stage.steps:,} steps of {_seconds(stage.time.step)}" if stage.steps else ""
    if stage.cost.seconds:
        save = f", saving {_seconds(stage.time.save)}" if stage.time.save else ""
        yield f"{_duration(stage.cost.seconds)}: start {_seconds(stage.time.start)}{steps}{save}"
        yield f"{stage.tokens:,.0f} tokens; {cost_in_words(stage.cost)}"
    elif stage.cost.labels:
        yield cost_in_words(stage.cost)


def way_lines(stage: StagePlan) -> Iterator[str]:
    """The ways of holding its models, a line each; the recipe's own has a star."""
    rows = [
        (
            f"{way.name}{' *' if way.is_own else ''}",
            "yes" if way.fits else "no",
            gib(way.peak),
            f"{way.step_s:.3g}",
            _duration(way.cost.seconds),
            ("" if way.cost.money is None else f"${way.cost.money:,.2f}")
            + (" (not in this version)" if way.changes is None else ""),
        )
        for way in stage.ways
    ]
    return columns([_WAY, *rows]) if rows else iter(())


def probe_lines(rows: Sequence[Probed]) -> Iterator[str]:
    """What was reckoned, measured and corrected."""
    heading = ("stage", "planned GiB", "measured", "corrected", "planned s/step", "measured", "passes of")
    table = [
        (
            row.stage,
            gib(row.planned_peak),
            gib(row.measured_peak),
            gib(row.corrected_peak),
            f"{row.planned_step_s:.3g}",
            f"{row.measured_step_s:.3g}",
            f"{row.pass_tokens:,} tokens" if row.pass_tokens else "",
        )
        for row in rows
        if not row.problem
    ]
    yield from columns([heading, *table]) if table else ()
    yield from (f"{row.stage}: not measured ({row.problem})" for row in rows if row.problem)


def simulated_lines(rows: Sequence[Simulated]) -> Iterator[str]:
    heading = ("stage", "layout", "s/step", "time", "idle", "GiB a GPU", "fits")
    table = [
        (
            row.stage,
            row.layout,
            f"{row.step_s:.3g}",
            _duration(row.seconds),
            f"{row.idle:.0%}",
            f"{row.memory / GIB:.1f}",
            "yes" if row.fits else "no",
        )
        for row in rows
    ]
    return columns([heading, *table])


def total_in_words(plan: Plan) -> str:
    times = f" in {plan.times} rounds" if plan.times > 1 else ""
    return f"{_duration(plan.total.seconds)}{times}, peak {gib(plan.peak)} GiB; {cost_in_words(plan.total)}"


def cost_in_words(cost: Cost) -> str:
    """
    >>> cost_in_words(Cost(seconds=3600, kwh=0.42, money=2.5, labels=100, label_money=50.0))
    '0.42 kWh, $2.50, 100 labels $50.00, $52.50 in all'
    """
    parts = [f"{cost.kwh:.2g} kWh"]
    parts += [f"${cost.money:,.2f}"] if cost.money is not None else []
    if cost.labels:
        price = f" ${cost.label_money:,.2f}" if cost.label_money is not None else ""
        parts.append(f"{cost.labels:,.0f} labels{price}")
    if cost.money is not None and cost.label_money:
        parts.append(f"${cost.money + cost.label_money:,.2f} in all")
    return ", ".join(parts)


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with their columns aligned, the first on the left.

    >>> list(columns([("role", "GiB"), ("base", "1.0")]))
    ['role  GiB', 'base  1.0']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            f"{text:<{width}}" if place == 0 else f"{text:>{width}}"
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def gib(size: float) -> str:
    """
    >>> gib(2**30), gib(5 * 2**20)
    ('1.0', '0.0049')
    """
    number = size / GIB
    return f"{number:.1f}" if number >= 0.95 or not number else f"{number:.2g}"


def _role_row(role: RoleBytes) -> tuple[str, ...]:
    sizes = (role.weights, role.gradients, role.optimiser, role.activations, role.cache, role.logits)
    return role.role, *(gib(size) if size else "–" for size in sizes)


def _passes(stage: StagePlan) -> str:
    passes = stage.memory.passes
    if passes is None:
        return ""
    unit = "rows" if passes.in_rows else "tokens"
    return f", passes of at most {passes.limit:,} {unit} ({passes.largest:,} tokens in the largest)"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _duration(seconds: float) -> str:
    """
    >>> _duration(45), _duration(200), _duration(7300), _duration(200_000)
    ('45 s', '3 min 20 s', '2 h 01 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 100_000:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
