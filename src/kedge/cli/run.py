"""`kedge run`: a recipe, from its first unfinished stage to its last."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kedge.cli.screen import counter, out, writing

if TYPE_CHECKING:
    from kedge.core.world import World


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe (YAML).")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one setting.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    if_begun: Annotated[
        bool, typer.Option("--resume-if-begun", help="The same where there is such a run; else begin. For schedulers.")
    ] = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of all runs.")] = Path("runs"),
    offline: Annotated[bool, typer.Option("--offline", help="Check without asking reward servers.")] = False,
    no_check: Annotated[bool, typer.Option("--no-check", help="Start without what kedge check does first.")] = False,
) -> None:
    """Run a recipe; everything it makes is in runs/NAME.

    Exit codes: 0 done; 1 failed; 2 bad input, nothing was changed; 3 stopped by a contract of the recipe, everything is
    saved; 4 waiting for people, --resume goes on when they are done; 130 interrupted (Ctrl-C, SIGTERM), everything is
    saved and --resume goes on.
    """
    from kedge.commands.check import refuse_unfit
    from kedge.commands.run import has_begun, run_placed
    from kedge.recipe.schema import load_recipe

    console = out()
    loaded = load_recipe(recipe, overrides or ())
    folder = runs / loaded.settings.name

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    def check() -> None:
        if not no_check:
            with counter("examples audited") as progress:
                refuse_unfit(loaded, progress=progress, offline=offline, runs=runs)

    def run_here(world: World, device: str | None, *, is_resumed: bool) -> None:
        from kedge.recipe.runner import run_recipe

        with writing(folder), live_view(console, folder, is_shown=world.rank == 0):
            run_recipe(loaded, runs, is_resumed=is_resumed, say=say, world=world, device=device)

    resume = resume or (if_begun and has_begun(folder))
    sets = [part for override in overrides or () for part in ("--set", override)]
    command = [sys.executable, "-P", "-m", "kedge.cli", "run", str(recipe), "--runs", str(runs), "--no-check", *sets]
    code = run_placed(loaded, folder, is_resumed=resume, command=command, check=check, run=run_here, say=say)
    if code:
        raise typer.Exit(code)


@contextmanager
def live_view(console: Console, folder: Path, *, is_shown: bool = True) -> Generator[None]:
    """On a terminal, the run as it goes, below the lines that it says."""
    if not (is_shown and console.is_terminal):
        yield
        return
    from rich.live import Live

    from kedge.commands.watch import beside

    live = Live(console=console, transient=True, auto_refresh=False)
    with live, beside(folder, lambda shown: live.update(shown, refresh=True)):
        yield
