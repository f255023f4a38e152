"""Helpers of the run-folder tests: a manifest to begin with, and child processes that are always cleaned up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from kedge.runs import Manifest, new_manifest

sys.path.insert(0, str(Path(__file__).parent))  # for `trouble`, whose cases a benchmark imports as well


@pytest.fixture
def manifest() -> Manifest:
    return new_manifest(name="hh", stage="ppo", kind="ppo", seed=7, settings={"clip": 0.2, "epochs": 3})


@pytest.fixture
def start() -> Generator[Callable[..., subprocess.Popen[str]]]:
    """Start `python -c script *arguments`; whatever still runs at the end of the test is killed."""
    children: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        children.append(child)
        return child

    yield run
    for child in children:
        child.kill()
        child.communicate()
