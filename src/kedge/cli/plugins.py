"""`kedge plugins`: the parts that are installed, ours and others'."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kedge.cli.screen import out, print_json


def plugins(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List stages, algorithms, rewards, generators, trackers and roles."""
    from dataclasses import asdict

    from kedge.core.plugins import installed

    parts = installed()
    if as_json:
        print_json([asdict(part) for part in parts])
        return
    table = Table("kind", "name", "package", box=None, pad_edge=False)
    table.add_column("from", overflow="fold")
    for part in parts:
        name, target = Text(part.name, style="bold"), Text(part.target, style="dim")
        table.add_row(part.kind, name, Text(part.package), target)
    out().print(table)
