"""Every ready recipe loads, is wired, and says in its first line what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import template_folder, templates
from kedge.recipe.wiring import connect

RECIPES = sorted(template_folder().glob("*.yaml"))


def test_there_are_recipes_for_the_commands_to_list() -> None:
    assert {"tiny", "loop", "reward-hh"} <= {file.stem for file in RECIPES}


@pytest.mark.parametrize("file", RECIPES, ids=[file.stem for file in RECIPES])
def test_a_ready_recipe_loads_and_is_wired(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.settings.name == file.stem
    assert set(connect(recipe).order) == set(recipe.stages)
    assert len(templates()[file.stem]) > 20
