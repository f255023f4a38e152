"""`kedge import`: a recipe from a configuration of TRL, OpenRLHF, LLaMA-Factory or Axolotl."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kedge.cli.screen import out, print_json, writing
from kedge.commands.command_line import kedge_command

if TYPE_CHECKING:
    from kedge.commands.importing.write import ImportedRecipe

_COLOURS = {"taken": "green", "changed": "yellow", "not needed": "dim", "refused": "bold red", "unknown": "bold red"}


def import_(
    tool: Annotated[str, typer.Argument(help="trl, openrlhf, llama-factory or axolotl.")],
    config: Annotated[Path, typer.Argument(help="Its YAML or JSON; of OpenRLHF a file with the command line.")],
    to: Annotated[Path, typer.Option("--to", help="The recipe to write; the table lies beside it.")] = Path(
        "recipe.yaml"
    ),
    trainer: Annotated[str | None, typer.Option(help="Of TRL, whose files do not say it: sft, dpo, grpo, …")] = None,
    model: Annotated[str | None, typer.Option(help="The model, in place of the one that is named.")] = None,
    data: Annotated[str | None, typer.Option(help="The data or prompts, in place of those that are named.")] = None,
    reward: Annotated[str | None, typer.Option(help="The reward model or stage, likewise.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="How many processes (GPUs) the tool was started with.")
    ] = None,
    skip_unknown: Annotated[bool, typer.Option("--skip-unknown", help="Leave out fields that nobody knows.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Write a recipe from another tool's configuration, with every field accounted for. Nothing of it is run."""
    from kedge.commands.importing.write import import_recipe, write_recipe
    from kedge.importing.rules import Asked

    asked = Asked(model=model, data=data, reward=reward, trainer=trainer, processes=processes)
    imported = import_recipe(tool, config, to, asked, skip_unknown=skip_unknown)
    with writing(to):
        write_recipe(imported)
    if as_json:
        print_json(imported.as_dict())
        return
    console = out()
    _print_table(console, imported)
    for path in (imported.file, imported.table_file):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    console.print(f"next: {kedge_command()} check {quote(str(imported.file))}", markup=False, soft_wrap=True)


def _print_table(console: Console, imported: ImportedRecipe) -> None:
    table = Table("field", "value", "", "becomes", "why", box=SIMPLE, show_edge=False, pad_edge=False)
    for row in imported.rows:
        colour = _COLOURS[row.verdict]
        verdict = f"[{colour}]{row.verdict}[/]" + (" [dim](by its default)[/]" if row.is_default else "")
        cells = (row.field, row.value, "\n".join(row.becomes), row.why)
        field, value, becomes, why = map(escape, cells)
        table.add_row(field, value, verdict, becomes, why)
    console.print(table)
    counts = ", ".join(f"{imported.count(verdict)} {verdict}" for verdict in _COLOURS if imported.count(verdict))
    console.print(f"\n{counts}", soft_wrap=True)
