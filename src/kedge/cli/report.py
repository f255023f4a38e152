"""`kedge report`: the story of a run on one page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import out, writing
from kedge.core.files import refuse_overwriting


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of one of its stages.")],
    to: Annotated[Path | None, typer.Option("--out", help="Where to write; else RUN/report.html.")] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (never what is read).")
    ] = False,
) -> None:
    """Write one HTML page about a run: what happened, curves, samples, events, lineage, cost."""
    from kedge.report.writing import write_report

    refuse_overwriting([to], inputs=[run], force=force, own=["report.html"])
    with writing(to or run):
        written = write_report(run, to)
    out().print(f"wrote {written}", markup=False, soft_wrap=True)
    if is_opened:
        webbrowser.open(written.resolve().as_uri())
