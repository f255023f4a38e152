"""`kedge check`: a recipe, its data and its models, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kedge.cli.screen import counter, out, print_error, print_findings, print_json, tell
from kedge.core.errors import ConfigError, KedgeError

if TYPE_CHECKING:
    from rich.console import Console

    from kedge.commands.check import RecipeReport


def check(
    recipes: Annotated[list[Path] | None, typer.Argument(help="Recipes (YAML).")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one setting.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")] = False,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print every setting, its value, and where that comes from; no checks.")
    ] = False,
    show_masks: Annotated[bool, typer.Option("--show-masks", help="Show which tokens are trained.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask reward servers and judges.")] = False,
) -> None:
    """Check recipes, their data and models; explain the batch arithmetic. Exit 2 if one is unfit."""
    from kedge.recipe.schema import recipe_schema

    if schema:
        print_json(recipe_schema())
        return
    if not recipes:
        raise ConfigError("kedge check: name at least one recipe, or --schema")
    if show_masks and as_json:
        raise ConfigError("kedge check: --show-masks is for reading and cannot go with --json; leave one out")
    if resolved:
        _print_resolved(recipes, overrides or [], as_json)
        return
    checked = [_check_one(recipe, overrides or [], show_masks, as_json, offline) for recipe in recipes]
    if as_json:
        print_json([found for found, _ in checked])
    if not all(is_fit for _, is_fit in checked):
        raise typer.Exit(2)


def _check_one(
    file: Path, overrides: list[str], show_masks: bool, as_json: bool, offline: bool
) -> tuple[dict[str, Any], bool]:
    """One report, shown; a recipe that cannot even be loaded does not keep the others from being checked."""
    from kedge.commands.check import check_recipe, masked_examples
    from kedge.recipe.schema import load_recipe

    console = out()
    try:
        recipe = load_recipe(file, overrides)
        with counter("examples audited", is_quiet=as_json) as progress:
            report = check_recipe(recipe, progress=progress, offline=offline)
        if not as_json:
            _print_report(console, report)
        in_colour = console.is_terminal and not console.no_color
        how = "green is trained" if in_colour else "⟦…⟧ is trained"
        for place, text in masked_examples(recipe, 2, in_colour=in_colour) if show_masks and report.is_fit else ():
            console.print(f"[dim]{escape(place)} ({how})[/]", soft_wrap=True)
            console.print(text, soft_wrap=True)
    except KedgeError as error:
        print_error(str(error))
        return {"file": str(file), "is_fit": False, "error": str(error)}, False
    return report.as_dict(), report.is_fit


def _print_resolved(recipes: list[Path], overrides: list[str], as_json: bool) -> None:
    """One setting a line, or a list of all of them for each recipe."""
    from kedge.recipe.resolved import resolved_settings
    from kedge.recipe.schema import load_recipe

    listed = [(file, resolved_settings(load_recipe(file, overrides))) for file in recipes]
    if as_json:
        print_json([{"file": str(file), "settings": [one.as_dict() for one in settings]} for file, settings in listed])
        return
    console = out()
    for file, settings in listed:
        if len(listed) > 1:
            console.print(str(file), markup=False, soft_wrap=True)
        for setting in settings:
            console.print(str(setting), markup=False, soft_wrap=True)


def _print_report(console: Console, report: RecipeReport) -> None:
    tell(console, f"[bold]{escape(str(report.file))}[/]")
    for model in report.models:
        tell(console, f"[bold]model[/] {escape(model.name)}: {model.in_words()}", indent="  ")
        print_findings(console, model.findings, indent="    ")
    for stage in report.stages:
        note = "" if stage.can_run else " [dim](checked only: this version cannot run it)[/]"
        kind = "" if stage.kind == stage.name else f" ({stage.kind})"
        tell(console, f"[bold]{escape(stage.name)}[/]{escape(kind)}{note}", indent="  ")
        for line in stage.lines:
            tell(console, escape(line), indent="    ")
        print_findings(console, stage.findings, indent="    ")
    if report.data:
        console.print("  [bold]data[/], all files together")
        print_findings(console, report.data, indent="    ")
    if report.rounds:
        console.print("  [bold]rounds[/]")
        for line in report.rounds:
            tell(console, escape(line), indent="    ")
    if report.placement:
        console.print("  [bold]placement[/]")
        for line in report.placement:
            tell(console, escape(line), indent="    ")
    print_findings(console, report.machine, indent="  ")
    _print_checked(console, report)
    fatal = sum(finding.level == "fatal" for finding in report.findings)
    warnings = sum(finding.level == "warning" for finding in report.findings)
    verdict = "[green]fit to run[/]" if report.is_fit else f"[bold red]not fit to run: {fatal} fatal[/]"
    console.print(f"  {verdict}{f', {warnings} warning(s)' if warnings else ''}\n")


def _print_checked(console: Console, report: RecipeReport) -> None:
    """What was looked at besides models and files, a line each."""
    if not report.checked:
        return
    rows = [(row.what, row.subject, row.result, ", ".join(row.used_by)) for row in report.checked]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    console.print("  [bold]checked[/]")
    for what, subject, result, users in rows:
        users = f" [dim]({escape(users)})[/]" if users else ""
        tell(console, f"{what:<{widths[0]}}  {escape(subject):<{widths[1]}}  {escape(result)}{users}", indent="    ")
