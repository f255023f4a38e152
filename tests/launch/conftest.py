"""The cases beside the tests are imported by name; the command line is run in a folder with a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def kedge(kedge: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`kedge` in a folder with the recipe r.yaml."""
    from launch_attacks import RECIPE

    (tmp_path / "r.yaml").write_text(RECIPE)
    return kedge
