"""The command line as a user runs it, in this process: arguments in, exit code and both streams out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kedge.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))  # for the collections of cases beside the tests


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    monkeypatch.chdir(tmp_path)

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
