"""`kedge doctor`: is a run healthy, what happened when, why most likely, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kedge.cli.screen import out, print_json, tell

if TYPE_CHECKING:
    from rich.console import Console

    from kedge.commands.doctor import Examined

_COLOURS = {"warning": "yellow", "fatal": "red"}


def doctor(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of one stage of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Say what is wrong with a run, since when and why, and what to change in its recipe."""
    from kedge.commands.doctor import examine, next_command

    examined = examine(run)
    if as_json:
        print_json([one.as_dict() for one in examined])
        return
    console = out()
    for one in examined:
        _print(console, one)
    if command := next_command(examined):
        tell(console, "[bold]try[/]")
        tell(console, escape(command), indent="  ")


def _print(console: Console, examined: Examined) -> None:
    from kedge.commands.doctor import recipe_diff

    found = examined.diagnosis
    mark = "[green]✓[/]" if found.is_healthy else "[yellow]![/]"
    tell(console, f"{mark} [bold]{escape(examined.stage)}[/] [dim]({examined.kind}, {examined.status})[/]")
    tell(console, escape(found.verdict), indent="  ")
    if not found.is_healthy:
        console.print("  [bold]what happened[/]")
        for moment in found.timeline:
            when = "" if moment.step is None else f"step {moment.step}: "
            tell(console, f"{when}{_coloured(moment.what, _COLOURS.get(moment.level))}", indent="    ")
    for number, cause in enumerate(found.causes, start=1):
        console.print("  [bold]most likely[/]" if number == 1 else "  [bold]or[/]")
        tell(console, f"{escape(cause.title)}: {escape(cause.explanation)}", indent="    ")
        for line in cause.evidence:
            tell(console, f"[dim]{escape(line)}[/]", indent="      ", mark="[dim]-[/]")
    if found.changes:
        console.print("  [bold]what to change, in this order[/]")
    for number, change in enumerate(found.changes, start=1):
        tell(console, f"{change.area}: {escape(change.key)}: {escape(change.why)}", indent="    ", mark=f"{number}.")
    for line in recipe_diff(examined.stage, found.changes):
        colour = {"-": "red", "+": "green"}.get(line[0])
        console.print(f"    {_coloured(line, colour)}", soft_wrap=True)
    for note in found.notes:
        tell(console, f"[dim]{escape(note)}[/]", indent="  ", mark="[blue]i[/]")


def _coloured(text: str, colour: str | None) -> str:
    return f"[{colour}]{escape(text)}[/]" if colour else escape(text)
