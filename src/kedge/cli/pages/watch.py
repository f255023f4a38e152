"""`kedge watch`: runs while they run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from kedge.cli.screen import out


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or stages, several side by side.")],
    web: Annotated[bool, typer.Option("--web", help="A local web page instead of the terminal.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 0,
) -> None:
    """Follow runs until they end: numbers, newest samples, events."""
    from kedge.commands import watch as watching

    console = out()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    feeds = watching.open_feeds(runs)
    with suppress(KeyboardInterrupt):
        if web:
            watching.serve(feeds, port=port, say=say)
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
                watching.follow(feeds, lambda shown: live.update(shown, refresh=True))
        else:
            watching.follow_plainly(feeds, say)
