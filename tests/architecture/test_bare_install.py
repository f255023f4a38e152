"""`pip install kedge` without extras: their packages are not there, and recipes are still checked and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = (
    *("alembic", "argon2", "bitsandbytes", "fastapi", "gguf", "jsonschema", "langdetect", "math_verify", "mlflow"),
    *("nh3", "peft", "psycopg", "ray", "sqlalchemy", "starlette", "tensorboard", "uvicorn", "wandb"),
)
BARE = f"""
import sys
for package in {EXTRAS}:
    sys.modules[package] = None  # it is not found, and an import of it fails
from importlib.metadata import entry_points
for stage in entry_points(group="kedge.stages"):
    stage.load()
from kedge.cli.main import main
sys.argv = ["kedge", "check", "recipes/tiny.yaml"]
main()
"""


def test_every_kind_of_stage_can_be_written_in_a_recipe_and_a_recipe_checked_without_any_extra() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fit to run" in done.stdout
