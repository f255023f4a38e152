"""`kedge compare`: runs of different methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import out, print_json, writing
from kedge.core.files import refuse_overwriting


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or of stages that trained a policy.")],
    to: Annotated[Path | None, typer.Option("--out", help="Also write one HTML page with charts there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable numbers and curves.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (never what is read).")
    ] = False,
) -> None:
    """Put runs side by side: reward against KL, win rates, length, time, tokens, memory."""
    from kedge.commands.compare import compare_runs

    refuse_overwriting([to], inputs=runs, force=force, own=["compare.html"])
    found = compare_runs(runs)
    if to is not None:
        with writing(to):
            found.write_page(to)
    if as_json:
        print_json(found.as_dict())
        return
    console = out()
    for line in (*found.lines(console.width if console.is_terminal else None), *([f"wrote {to}"] if to else [])):
        console.print(line, markup=False, soft_wrap=True)
