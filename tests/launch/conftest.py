"""The cases beside the tests are imported by name; the command line is run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kedge.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """`kedge` in a folder with the recipe r.yaml."""
    monkeypatch.chdir(tmp_path)
    from launch_attacks import RECIPE

    (tmp_path / "r.yaml").write_text(RECIPE)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kedge", *arguments])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        streams = capsys.readouterr()
        assert isinstance(code, int)
        return Done(code, streams.out, streams.err)

    return run
