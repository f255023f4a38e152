"""`kedge plan`: memory, time and money of a recipe before it runs, and the way that fits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kedge.cli.screen import errors_to, out, print_json, tell, writing

if TYPE_CHECKING:
    from rich.console import Console

    from kedge.commands.plan.command import Answer


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe (YAML).")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="CARD", help="h200, a100-80g, 4090, …, cpu, or GiB; else what is here."),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="How many of them.")] = 1,
    price: Annotated[float | None, typer.Option("--price", metavar="USD", help="Of one GPU an hour.")] = None,
    label_price: Annotated[
        float | None, typer.Option("--label-price", metavar="USD", help="Of one label, by people or a judge.")
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure two steps of each stage here, and correct.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Layouts of GPUs, by the model of scale.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one setting.")] = None,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write the proposed recipe.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Plan a recipe: memory by role, time, energy, money, and ways to hold the models that fit."""
    from kedge.commands.plan.command import Asked
    from kedge.commands.plan.command import plan as plan_asked

    asked = Asked(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        gpu=gpu,
        gpus=gpus,
        price=price,
        label_price=label_price,
        probe=probe,
        simulate=simulate,
        write=write,
        force=force,
    )
    with writing(write or Path(".")):
        answer = plan_asked(asked, lambda text: errors_to().print(text, markup=False, soft_wrap=True))
    if as_json:
        print_json(answer.as_dict())
        return
    _print(out(), answer)


def _print(console: Console, answer: Answer) -> None:
    from kedge.commands.plan.words import (
        machine_in_words,
        probe_lines,
        simulated_lines,
        stage_lines,
        total_in_words,
        way_lines,
    )

    plan = answer.plan
    tell(console, f"[bold]{escape(str(answer.file))}[/] on {escape(machine_in_words(plan.machine))}")
    for stage in plan.stages:
        kind = "" if stage.kind == stage.name else f" ({stage.kind})"
        tell(console, f"[bold]{escape(stage.name)}[/]{escape(kind)}", indent="  ")
        _print_lines(console, stage_lines(stage, plan.machine))
        _print_lines(console, way_lines(stage))
    if answer.probed:
        console.print("  [bold]probe[/]: two steps of each stage on this machine")
        _print_lines(console, probe_lines(answer.probed))
    if answer.simulated:
        console.print("  [bold]simulated[/]: a model, not a measurement (docs/scale-model.md)")
        _print_lines(console, simulated_lines(answer.simulated))
    tell(console, f"[bold]in all[/] {escape(total_in_words(plan))}", indent="  ")
    for note in plan.notes:
        tell(console, f"[dim]{escape(note)}[/]", indent="    ")
    _print_verdict(console, answer)


def _print_verdict(console: Console, answer: Answer) -> None:
    stuck = [stage.name for stage in answer.plan.stages if not stage.fits and stage.best is None]
    if answer.diff:
        why = "the cheapest way that fits" if not answer.plan.fits else "faster, and learns the same"
        console.print(f"  [bold]proposed[/]: {why}")
        _print_lines(console, answer.diff)
    if stuck:
        names = escape(", ".join(stuck))
        tell(console, f"[bold red]no way fits[/] for {names}: a larger card, more GPUs, or shorter rows", indent="  ")
    elif answer.plan.fits:
        console.print("  [green]fits[/]")
    if answer.written is not None:
        tell(console, f"wrote {escape(str(answer.written))}", indent="  ")


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(f"    {line}", markup=False, soft_wrap=True)
