"""Whole recipes on small data, run as the command runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command line in this process and below `tmp_path`; returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kedge", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        assert isinstance(code, int)
        return code

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[str, Iterable[Mapping[str, Any]]], Path]:
    """Write JSON Lines."""

    def write(name: str, made: Iterable[Mapping[str, Any]]) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
        return file

    return write
