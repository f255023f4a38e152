"""`kedge studio`: everything in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import out


def studio(
    folder: Annotated[Path, typer.Argument(help="Folder of the project; made where it is missing.")] = Path(),
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one. Else that of the last time.")
    ] = None,
    runs_at_once: Annotated[int, typer.Option("--runs-at-once", min=1, help="Runs at the same time.")] = 1,
    upload_limit: Annotated[
        float, typer.Option("--upload-limit", metavar="GIB", min=0.001, help="Largest file that may be uploaded.")
    ] = 1.0,
) -> None:
    """A web application on this machine: recipes as forms, runs started and watched, reports, chats."""
    from kedge.commands.studio import StudioSettings, serve_studio

    console = out()
    settings = StudioSettings(folder=folder, port=port, runs_at_once=runs_at_once, upload_gib=upload_limit)
    with suppress(KeyboardInterrupt):
        serve_studio(settings, say=lambda text: console.print(text, markup=False, soft_wrap=True))
