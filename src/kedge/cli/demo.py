"""`kedge demo`: what Kedge does, on this machine, with nothing but this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kedge.cli import check
from kedge.cli.screen import out, tell, writing


def demo(
    to: Annotated[Path, typer.Option("--to", help="Where to put it all.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0)] = 7,
) -> None:
    """Write the recipe `tiny` with its data, check it and run it."""
    from kedge.pipeline.recipe import load_recipe
    from kedge.pipeline.runner import run_recipe
    from kedge.pipeline.templates import free_folder, write_template

    console = out()
    to = free_folder(to)
    overrides = [f"seed={seed}"]
    with writing(to):
        recipe, *_ = write_template("tiny", to)
        tell(console, f"[bold]1. a recipe and its data[/], in {escape(str(to))}")
        console.print("[bold]2. kedge check[/]: what can be known before training")
        check.check([recipe], overrides)
        console.print("[bold]3. kedge run[/]")
        folder = run_recipe(
            load_recipe(recipe, overrides),
            to / "runs",
            is_resumed=False,
            say=lambda text: console.print(text, markup=False, soft_wrap=True),
        )
    again = f"kedge run {recipe} --set name=mine"
    tell(console, escape(f"\nLook around in {folder}; change {recipe} and run it again: {again}"))
