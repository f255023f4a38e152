"""`kedge run`: a recipe, from its first unfinished stage to its last."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kedge.cli.screen import counter, out, writing


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe (YAML).")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one setting.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of all runs.")] = Path("runs"),
    offline: Annotated[bool, typer.Option("--offline", help="Check without asking reward servers.")] = False,
    no_check: Annotated[bool, typer.Option("--no-check", help="Start without what kedge check does first.")] = False,
) -> None:
    """Run a recipe; everything it makes is in runs/NAME.

    Exit codes: 0 done; 1 failed; 2 bad input, nothing was changed; 3 stopped by a contract of the recipe, everything is
    saved; 130 interrupted (Ctrl-C, SIGTERM), everything is saved and --resume goes on.
    """
    from kedge.commands.check import refuse_unfit
    from kedge.recipe.runner import run_recipe
    from kedge.recipe.schema import load_recipe

    console = out()
    loaded = load_recipe(recipe, overrides or ())
    if not (resume or no_check):
        with counter("examples audited") as progress:
            refuse_unfit(loaded, progress=progress, offline=offline, runs=runs)
    folder = runs / loaded.settings.name
    with writing(folder), live_view(console, folder):
        run_recipe(
            loaded,
            runs,
            is_resumed=resume,
            say=lambda text: console.print(text, markup=False, soft_wrap=True),
        )


@contextmanager
def live_view(console: Console, folder: Path) -> Generator[None]:
    """On a terminal, the run as it goes, below the lines that it says."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    from kedge.commands.watch import beside

    live = Live(console=console, transient=True, auto_refresh=False)
    with live, beside(folder, lambda shown: live.update(shown, refresh=True)):
        yield
