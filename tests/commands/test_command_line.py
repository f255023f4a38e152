"""Commands that are printed can be typed as they are printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kedge.commands.command_line import kedge_command


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in `.venv` of the working folder, which is not on the path."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "kedge").write_text("#!/bin/sh\necho called\n")
    (folder / "kedge").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return folder


def test_off_the_path_the_command_is_the_path_of_the_environment(environment: Path) -> None:
    assert kedge_command() == ".venv/bin/kedge"
    assert subprocess.check_output(kedge_command(), shell=True, text=True) == "called\n"


def test_on_the_path_it_is_its_name(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin:/bin")
    assert kedge_command() == "kedge"


def test_another_environments_command_is_not_taken_for_this_one(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kedge").write_text("#!/bin/sh\n")
    (other / "kedge").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    assert kedge_command() == ".venv/bin/kedge"


def test_from_another_folder_the_path_is_whole(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert kedge_command() == str(environment / "kedge")


def test_without_a_script_python_runs_the_package(environment: Path) -> None:
    (environment / "kedge").unlink()
    assert kedge_command() == ".venv/bin/python -m kedge.cli"
