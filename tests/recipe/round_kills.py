"""A run of two rounds that is killed (signal 9) as soon as some file is there, and then resumed: it must give what the
run gives that nothing happened to. `attempt` tries one place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from small_rounds import write_rounds

from kedge.runs.manifest import MANIFEST_NAME, read_manifest

CASES = (
    "round-1/run.json",
    "round-1/ppo/metrics.jsonl",
    "round-1/drift.json",
    "round-2/run.json",
    "round-2/ask/answers.jsonl",
    "round-2/reward/inputs/data.jsonl",
    "round-2/reward/run.json",
    "round-2/ppo/checkpoints/step-000001",
    "round-2/drift/run.json",
    "round-2/drift/figures.json",
)
PATIENCE_S = 240.0
_STEPS = {"time", "at", "tokens"}
"""Metrics of the clock, which no two runs have alike."""


def attempt(place: str) -> str | None:
    """None where the killed and resumed run is the undisturbed one; else what differs."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_rounds(Path(folder))
        has_been_killed = run(recipe, kill_at=place)
        if run(recipe, "--resume") != 0:
            return f"{place}: could not be resumed"
        found, wanted = results(recipe.parent / "runs/small"), undisturbed()
        differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if has_been_killed != -signal.SIGKILL:
            return f"{place}: the run ended with {has_been_killed} before it could be killed"
        return f"{place}: {', '.join(differing)} differ" if differing else None


@cache
def undisturbed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_rounds(Path(folder))
        assert run(recipe) == 0
        return results(recipe.parent / "runs/small")


def run(recipe: Path, *more: str, kill_at: str | None = None) -> int:
    """Run in a process of its own, killed once the file `kill_at` of the run is there; gives its exit code."""
    runs = recipe.parent / "runs"
    command = [sys.executable, "-m", "kedge.cli", "run", str(recipe), "--runs", str(runs), "--no-check", *more]
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env={**os.environ, "OMP_NUM_THREADS": "1"})
        until = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < until:
            if kill_at is not None and (runs / "small" / kill_at).exists():
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        return process.wait(timeout=PATIENCE_S)


def results(folder: Path) -> dict[str, Any]:
    """Everything that a run computed: outputs by their hashes, metrics without the clock, drift and the best."""
    found: dict[str, Any] = {}
    for stage in _stages(folder):
        name = str(stage.relative_to(folder))
        manifest = read_manifest(stage)
        found[name] = (manifest.status, [(output.name, output.hash) for output in manifest.outputs])
        metrics = stage / "metrics.jsonl"
        if metrics.is_file():
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            found[f"{name} metrics"] = [
                {key: value for key, value in row.items() if key.partition("/")[0] not in _STEPS} for row in rows
            ]
    for file in (folder / "best.json", *sorted(folder.glob("round-*/drift.json"))):
        found[str(file.relative_to(folder))] = json.loads(file.read_text())
    return found


def _stages(folder: Path) -> Iterator[Path]:
    yield from (file.parent for file in sorted(folder.rglob(MANIFEST_NAME)) if read_manifest(file.parent).stage)
