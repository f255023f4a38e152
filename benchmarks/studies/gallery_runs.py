"""The runs of the gallery: the demo, and every shipped recipe that trains the tiny model, as a reader types them.

A run is a folder below the work folder, made once: `NAME/figures.json` is its last file, and says what its report says.
Left out are recipes that want a judge, a GPU or data of your own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from common import Record
from kedge.core.files import write_json
from kedge.report.run.run_records import read_run
from kedge.report.run.summary import outcomes

RECIPES = Path(__file__).parents[2] / "recipes"
FIRST = ("demo", "rounds")
"""Those that pictures are taken of."""


def names() -> list[str]:
    tiny = [file.stem for file in sorted(RECIPES.glob("*.yaml")) if is_tiny(file)]
    return [*FIRST, *(name for name in tiny if name not in FIRST)]


def is_tiny(recipe: Path) -> bool:
    text = recipe.read_text(encoding="utf-8")
    return "\nmodel: tiny" in text and "kind: judge" not in text


def make(work: Path, name: str) -> Record:
    """The figures of a run, which is made where it is not there yet."""
    file = work / name / "figures.json"
    if not file.is_file():
        shutil.rmtree(work / name, ignore_errors=True)  # begun, and broken off
        work.mkdir(parents=True, exist_ok=True)
        before = processor_seconds()
        for command in commands(name):
            kedge(command, work if name == "demo" or command[0] == "new" else work / name)
        spent = processor_seconds() - before
        write_json(file, {"seconds": round(spent), "outcomes": list(results(folder(work, name)))})
    return json.loads(file.read_bytes())


def commands(name: str) -> list[list[str]]:
    if name == "demo":
        return [["demo", "--folder", "demo"]]
    return [["new", name, "--to", name], ["run", f"{name}.yaml"]]


def typed(name: str) -> list[str]:
    """What a reader types for the same, in a folder of their own."""
    return ["kedge demo"] if name == "demo" else [f"kedge new {name}", f"kedge run {name}.yaml"]


def kedge(arguments: list[str], at: Path) -> None:
    """A command in a process of its own, on one thread."""
    subprocess.run([sys.executable, "-m", "kedge.cli", *arguments], cwd=at, check=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def processor_seconds() -> float:
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def folder(work: Path, name: str) -> Path:
    return work / name / "runs" / name


def results(run: Path) -> Iterator[str]:
    """What the report says of it, in its own sentences; of rounds, round by round, and which was kept."""
    rounds = sorted(run.glob("round-*"))
    if not rounds:
        yield from outcomes(read_run(run))
        return
    for place in rounds:
        yield from (f"Round {place.name[6:]}: {text}" for text in outcomes(read_run(place)) if "gold" in text)
    words = json.loads((run / "best.json").read_bytes())["words"]
    yield f"{words[:1].upper()}{words[1:]}."
