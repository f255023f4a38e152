"""The command itself: help, version, start-up, exit codes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
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
    assert len(done.out.rstrip().splitlines()) <= 44
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


COMMANDS = ("", "demo", "new", "check", "run", "watch", "report", "doctor", "compare", "sample", "score", "plugins")
GROUPS = ("data check", "data convert", "data split", "models list", "models fetch", "models check")


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_help_shows_flags_as_flags_in_80_columns(kedge: Kedge, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = kedge(*command.split(), "--help")
    assert done.code == 0
    assert "<bool>" not in done.out
    assert "BOOLEAN" not in done.out
    assert " --no-" not in done.out.replace("--no-check", "")
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert "…" not in done.out


def test_exit_codes_are_in_the_help_of_run_and_in_the_docs(kedge: Kedge) -> None:
    text = " ".join(kedge("run", "--help").out.replace("│", " ").split())
    assert "130 interrupted (Ctrl-C, SIGTERM), everything is saved and --resume goes on." in text
    docs = Path(__file__).parents[2] / "docs" / "concepts.md"
    assert "130" in docs.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [("plugins",), ("models", "list")])
def test_tables_fit_80_columns_and_are_whole(
    kedge: Kedge, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = kedge(*arguments)
    assert done.code == 0
    assert "…" not in done.out
    assert all(len(line.rstrip()) <= 80 for line in done.out.splitlines())


def test_no_color_is_honoured_on_a_terminal() -> None:
    """Every line that comes of the command itself, its help and its errors, on a terminal that could show colours."""
    for arguments in (["plugins"], ["--help"], ["report", "no/such/run"], ["run"]):
        colours = {no_color: _on_a_terminal(arguments, no_color=no_color) for no_color in (True, False)}
        assert not re.search(rb"\x1b\[[\d;]*3[0-7]|\x1b\[[\d;]*9[0-7]", colours[True]), arguments
        assert b"\x1b[" in colours[False], arguments


def _on_a_terminal(arguments: list[str], *, no_color: bool) -> bytes:
    """What the command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80"} | ({"NO_COLOR": "1"} if no_color else {})
    command = [sys.executable, "-m", "kedge.cli", *arguments]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    with suppress(OSError):  # the terminal is gone when the command has ended
        while more := os.read(ours, 65536):
            text += more
    os.close(ours)
    child.wait()
    return text


EVIL = "a\x1b[2J\u202e\x07\n[bold]x[/bold]:smile:\udcff"
PLAIN = "[bold]x[/bold]:smile:"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((EVIL,), PLAIN),
        (("data", EVIL), PLAIN),
        (("run", f"--{EVIL}"), PLAIN),
        (("run", "a.yaml", EVIL), PLAIN),
        (("doctor", f"--{EVIL}={EVIL}"), PLAIN),
        (("check", "a.yaml", f"--resolved={EVIL}"), "does not take a value"),
        (("sample", "x", "--seed", EVIL), "--seed"),
    ],
)
def test_usage_errors_are_escaped_as_our_own_messages_are(kedge: Kedge, arguments: tuple[str, ...], words: str) -> None:
    done = kedge(*arguments)
    assert done.code == 2
    assert words in done.err
    assert not set("\x1b\u202e\x07\udcff") & set(done.err)
    assert len(done.err.splitlines()) <= 8  # a line break of the argument makes no line of ours


def test_a_usage_error_is_cut_where_it_is_long(kedge: Kedge) -> None:
    done = kedge("run", "--" + "x" * 100_000)
    assert (done.code, len(done.err) < 3000) == (2, True)
