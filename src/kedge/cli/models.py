"""`kedge models`: the built-in models, and what is known of any."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kedge.cli.screen import out, print_findings, tell
from kedge.commands.command_line import kedge_command
from kedge.core.findings import has_fatal

app = typer.Typer(name="models", help="Built-in models: list, fetch, check.", no_args_is_help=True)


@app.command("list")
def list_models() -> None:
    """The short names that a recipe's `model:` may use."""
    from kedge.commands.models import built_in

    table = Table("alias", "what it is", "ready", box=None, pad_edge=False)
    for alias, summary, is_ready in built_in():
        table.add_row(f"[bold]{alias}[/]", summary, "yes" if is_ready else f"{kedge_command()} models fetch {alias}")
    out().print(table)


@app.command()
def fetch(alias: Annotated[str, typer.Argument(help="A built-in model, for example smollm2-135m.")]) -> None:
    """Install the weights of a built-in model and convert them, once."""
    from kedge.commands.models import fetch_model

    out().print(f"{alias}: {fetch_model(alias)}", soft_wrap=True)


@app.command()
def check(model: Annotated[str, typer.Argument(help="An alias, a folder, or a hub id.")]) -> None:
    """Size, window, tokenizer and chat template of a model. Exit 2 when it is not fit for use."""
    from kedge.commands.check import check_model

    report = check_model(model)
    console = out()
    tell(console, f"[bold]{escape(model)}[/]: {report.in_words()}")
    print_findings(console, report.findings)
    if has_fatal(report.findings):
        raise typer.Exit(2)
