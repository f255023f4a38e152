"""Settings for every test: one torch thread, quiet libraries, no network, signals as on a terminal."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The commands of this environment are on the path, as in an activated one: printed commands name them.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

# A suite that a script starts in its background finds Ctrl-C ignored, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are collected: there is no garbage in what they are made of
torch.set_num_threads(1)
settings.register_profile("kedge", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("kedge")


def pytest_collection_finish() -> None:
    """Thousands of collected tests are looked through at every collection of garbage, unless they are left out."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _no_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text), encoding="utf-8")
        return file

    return write_file


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code and both streams."""

    code: int
    out: str
    err: str


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """The command line as a user runs it, in this process and in an empty folder."""
    from kedge.cli.main import main

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
