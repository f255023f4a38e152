"""The command itself: help, version, start-up, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kedge as package

Kedge = Callable[..., Any]


def test_the_version_is_that_of_the_package(kedge: Kedge) -> None:
    done = kedge("--version")
    assert (done.code, done.out.strip()) == (0, f"kedge {package.__version__}")


def test_help_fits_one_screen_and_is_grouped(kedge: Kedge) -> None:
    done = kedge("--help")
    assert done.code == 0
    assert len(done.out.rstrip().splitlines()) <= 40
    for word in ("Start here", "A run", "Data, models, parts", "demo", "check", "run", "data", "--install-completion"):
        assert word in done.out


def test_starting_up_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv=['kedge', '--help']\n"
        "from kedge.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch','transformers','numpy','pydantic','datasets','pyarrow'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_recipe_loads_without_torch(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("kedge: 1\nname: a\nmodel: tiny\nstages: {sft: {kind: sft, data: d.jsonl}}\n")
    code = (
        "import sys; from pathlib import Path\n"
        "from kedge.recipe.schema import load_recipe\n"
        f"load_recipe(Path({str(recipe)!r}))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_command_is_bad_input(kedge: Kedge) -> None:
    done = kedge("chek")
    assert done.code == 2
    assert "No such command 'chek'" in done.err


def test_an_error_of_ours_is_one_message_without_a_traceback(kedge: Kedge) -> None:
    done = kedge("check", "gone.yaml")
    assert done.code == 2
    assert done.err.startswith("error: gone.yaml: there is no such recipe")
    assert "Traceback" not in done.err


def test_a_full_disk_is_a_failure_in_one_line(kedge: Kedge, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere/file")

    monkeypatch.setattr("kedge.recipe.templates.write_template", full)
    done = kedge("new", "tiny")
    assert done.code == 1
    assert done.err.strip() == "error: /somewhere/file: No space left on device"


def test_plugins_lists_parts_with_their_package(kedge: Kedge) -> None:
    import json

    done = kedge("plugins", "--json")
    parts = {(part["kind"], part["name"]): part for part in json.loads(done.out)}
    assert parts["stages", "sft"]["package"] == "kedge"
    assert parts["trackers", "tensorboard"]["target"] == "kedge.monitor.trackers.tensorboard:make"
