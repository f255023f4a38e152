"""`kedge new`: a recipe to start from."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from kedge.cli.screen import out, writing
from kedge.commands.command_line import kedge_command


def new(
    template: Annotated[str | None, typer.Argument(help="Which recipe; without it, the list.")] = None,
    folder: Annotated[Path, typer.Option("--to", help="Where to write it.")] = Path(),
) -> None:
    """Write a ready recipe, with the data it needs where we ship some."""
    from kedge.recipe.templates import START, templates, write_template

    console = out()
    if template is None:
        table = Table("template", "what it is", box=SIMPLE, show_edge=False, pad_edge=False)
        for name, summary in templates().items():
            table.add_row(f"[bold]{name}[/]", summary, end_section=name == START[-1])
        console.print(table)
        console.print(f"\n[dim]{escape(kedge_command())} new TEMPLATE writes one here.[/]")
        return
    with writing(folder):
        written = write_template(template, folder)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    console.print(f"next: {kedge_command()} check {quote(str(written[0]))}", markup=False, soft_wrap=True)
