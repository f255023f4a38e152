"""Settings for every test: one torch thread, quiet libraries, no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The commands of this environment are on the path, as in an activated one: printed commands name them.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("kedge", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("kedge")


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
