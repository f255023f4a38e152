"""The `kedge` command: its help, its version, and how errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

from kedge import __version__
from kedge.cli import (
    badcase,
    check,
    compare,
    data,
    demo,
    doctor,
    exam,
    gate,
    models,
    new,
    plugins,
    report,
    run,
    sample,
    score,
    serve,
)
from kedge.cli.chat.app import chat
from kedge.cli.export.app import export
from kedge.cli.flags import show_flags
from kedge.cli.importing.app import import_
from kedge.cli.judge import app as judge
from kedge.cli.label import app as label
from kedge.cli.launch import app as launch
from kedge.cli.pages import board, studio, watch
from kedge.cli.plan.app import plan
from kedge.cli.screen import print_error
from kedge.core.errors import KedgeError

app = typer.Typer(
    name="kedge",
    help="RLHF from data to report: move a policy towards what people prefer while the reference holds it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

START, WORK, DECIDE, PARTS = "Start here", "A run", "May it go out?", "Data, models, parts"
app.command(rich_help_panel=START)(demo.demo)
app.command(rich_help_panel=START)(new.new)
app.command(rich_help_panel=START)(studio.studio)
app.command("import", rich_help_panel=START)(import_)
app.command(rich_help_panel=WORK)(check.check)
app.command(rich_help_panel=WORK)(plan)
app.command(rich_help_panel=WORK)(run.run)
app.add_typer(launch.app, rich_help_panel=WORK)
app.command(rich_help_panel=WORK)(watch.watch)
app.command(rich_help_panel=WORK)(report.report)
app.command(rich_help_panel=WORK)(doctor.doctor)
app.command(rich_help_panel=WORK)(compare.compare)
app.command(rich_help_panel=WORK)(sample.sample)
app.command(rich_help_panel=WORK)(score.score)
app.command(rich_help_panel=WORK)(serve.serve)
app.command(rich_help_panel=WORK)(chat)
app.command(rich_help_panel=WORK)(export)
app.add_typer(exam.app, rich_help_panel=DECIDE)
app.command(rich_help_panel=DECIDE)(gate.gate)
app.add_typer(badcase.app, rich_help_panel=DECIDE)
app.command(rich_help_panel=DECIDE)(gate.promote)
app.command(rich_help_panel=DECIDE)(board.board)
app.add_typer(label.app, rich_help_panel=PARTS)
app.add_typer(judge.app, rich_help_panel=PARTS)
app.add_typer(data.app, rich_help_panel=PARTS)
app.add_typer(models.app, rich_help_panel=PARTS)
app.command(rich_help_panel=PARTS)(plugins.plugins)
show_flags(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]  # typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@cache
def _command() -> Any:
    """All commands with their options, which takes longer to build than most commands take to start."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by a contract, 4 waiting for people,
    130 interrupted."""
    # Libraries draw progress bars of their own, which no terminal and no log file needs between our lines.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        _command()()
    except KedgeError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except RuntimeError as error:
        # How pathlib says so before Python 3.13. Other errors of this class are faults of ours.
        if not str(error).startswith("Symlink loop"):
            raise
        print_error(f"{error}: a symbolic link leads back to itself; remove it")
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}")
        sys.exit(1)
