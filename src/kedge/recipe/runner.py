"""Runs a recipe: once, or as many rounds as it asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.core.world import ALONE, World
from kedge.recipe.pipeline import OnStep, run_pipeline
from kedge.recipe.run_rounds import run_rounds
from kedge.recipe.schema import Recipe
from kedge.stages.shared.context import Say

if TYPE_CHECKING:
    from kedge.runtime.groups import Groups


def run_recipe(
    recipe: Recipe,
    runs: Path,
    *,
    is_resumed: bool,
    say: Say,
    world: World = ALONE,
    device: str | None = None,
    groups: Groups | None = None,
) -> Path:
    """Run every stage that is not done yet, in `runs/NAME`; returns that folder."""
    folder = runs / recipe.settings.name
    return run_in(folder, recipe, is_resumed=is_resumed, say=say, world=world, device=device, groups=groups)


def run_in(
    folder: Path,
    recipe: Recipe,
    *,
    is_resumed: bool,
    say: Say,
    on_step: OnStep | None = None,
    write_inputs: Callable[[], None] = lambda: None,
    world: World = ALONE,
    device: str | None = None,
    groups: Groups | None = None,
) -> Path:
    """The same in any folder (`run_pipeline` says more)."""
    run = run_pipeline if recipe.settings.rounds is None else run_rounds
    return run(
        folder,
        recipe,
        is_resumed=is_resumed,
        say=say,
        on_step=on_step,
        write_inputs=write_inputs,
        world=world,
        device=device,
        groups=groups,
    )
