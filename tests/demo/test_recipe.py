"""The demo's folder: recipes that load and connect, the same files for a seed, and nothing heavy to write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kedge.demo.recipe import Version, write_demo
from kedge.demo.world import Sizes
from kedge.recipe.schema import load_recipe
from kedge.recipe.wiring import connect

SMALL = Sizes(demonstrations=40, pairs=40, prompts=5, heldout=5)


@pytest.mark.parametrize("version", get_args(Version))
def test_the_recipe_loads_and_everything_it_reads_is_there(tmp_path: Path, version: Version) -> None:
    recipe = load_recipe(write_demo(tmp_path / "demo", 4, SMALL, version=version))
    assert recipe.settings.seed == 4
    links = [link for links in connect(recipe).links.values() for link in links]
    assert {link.stage for link in links} >= {"prepare", "sft", "reward", "ppo"}
    assert all(Path(link.source()).exists() for link in links if not link.stage)


def test_the_versions_differ_in_name_and_stages(tmp_path: Path) -> None:
    recipes = {name: load_recipe(write_demo(tmp_path / name, 4, SMALL, version=name)) for name in get_args(Version)}
    assert {name: (recipe.settings.name, list(recipe.kinds)) for name, recipe in recipes.items()} == {
        "plain": ("demo", ["prepare", "sft", "reward", "ppo", "eval"]),
        "all": ("demo-all", ["prepare", "sft", "reward", "ppo", "dpo", "best8", "eval"]),
        "overoptimised": ("demo-overoptimised", ["prepare", "sft", "reward", "ppo", "eval"]),
    }


def test_the_same_seed_writes_the_same_folder(tmp_path: Path) -> None:
    folders = [write_demo(tmp_path / name, seed, SMALL).parent for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, again, other = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in folders
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {
        "demo.yaml",
        "model/model.safetensors",
        *(f"data/{name}.jsonl" for name in ("demonstrations", "pairs", "prompts", "heldout-prompts")),
    }


def test_the_world_is_imported_without_torch() -> None:
    code = "import sys, kedge.demo.recipe; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
