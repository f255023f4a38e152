"""One seed of the study of overoptimisation: where its things are, and its runs, side by side where there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import overoptimisation_data as data
from common import Clock, Options, Record, SeedFile, stage_cost
from kedge.api.run import Run
from kedge.core.errors import KedgeError
from kedge.core.files import write_json
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from overoptimisation_plan import Plan

STUDY = "overoptimisation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One seed of the study: where things are, and what is said and written down on the way."""

    options: Options
    plan: Plan
    say: Clock
    results: SeedFile

    @property
    def shared(self) -> Path:
        """What all seeds have in common."""
        return self.options.work.parent / f"{STUDY}-shared"

    @property
    def files(self) -> data.Files:
        return data.Files(folder=self.shared / "data")

    @property
    def policy(self) -> Path:
        return self.shared / "sft" / "sft" / "model"

    @property
    def gold(self) -> Path:
        return self.shared / "gold" / "gold" / "model"

    def proxy(self, name: str) -> Path:
        return self.options.work / name / "proxy" / "model"

    @property
    def proxies(self) -> list[tuple[str, int, int]]:
        """Name, number of labels and members of each proxy."""
        plan = self.plan
        singles = [(f"single-{labels}", labels, 1) for labels in plan.labels]
        return singles + [(f"ensemble-{labels}", labels, plan.members) for labels in plan.ensembles]

    @property
    def trained(self) -> list[str]:
        """The proxies that are there; without one of them, the others still say something."""
        return [name for name, _, _ in self.proxies if is_done(self.options.work / name)]


def has_begun(run: Path) -> bool:
    """Whether there is something to go on with; a run that was killed as it began has a folder and nothing in it."""
    return (run / "run.json").is_file()


def is_done(run: Path) -> bool:
    return has_begun(run) and Run(run).status == "done"


Job = tuple[str, Path, Record]
"""A recipe of one stage: its name, the folder of the run's folder, and the stage by its name."""


def run_jobs(
    study: Study, jobs: Sequence[Job], *, seed: int, when_done: Callable[[Record], None] = lambda _: None
) -> Record:
    """Every job as `kedge run` runs it, each resumed where it was: seconds and memory of each that ended well. Where
    some may run side by side, each has a process of its own. Nothing is lost of the others where one fails.
    `when_done` gets the costs so far whenever one has ended well."""

    def run(job: Job) -> tuple[str, Record | None]:
        name, folder, stages = job
        place = folder / name
        if not is_done(place):
            folder.mkdir(parents=True, exist_ok=True)
            recipe = {"kedge": 1, "name": name, "seed": seed, "model": study.plan.model, "device": study.plan.device}
            write_json(folder / f"{name}.yaml", recipe | {"stages": stages})
            try:
                (run_here if study.plan.at_once == 1 else run_apart)(folder, name, at_once=study.plan.at_once)
            except (RuntimeError, KedgeError) as error:
                study.say(f"{name} failed: {error}")
                return name, None
        cost = stage_cost(place, next(iter(stages)))
        study.say(f"{name}: {cost['seconds']:.0f} s")
        return name, cost

    costs: Record = {}
    with ThreadPoolExecutor(study.plan.at_once) as pool:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            name, cost = future.result()
            if cost is not None:
                costs[name] = cost
                when_done(costs)
    if not costs:
        raise RuntimeError(f"all of {', '.join(name for name, _, _ in jobs)} failed; the logs are beside their folders")
    return costs


def run_here(folder: Path, name: str, *, at_once: int) -> None:
    with (folder / f"{name}.log").open("w") as log:
        recipe = load_recipe(folder / f"{name}.yaml")
        run_recipe(recipe, folder, is_resumed=has_begun(folder / name), say=partial(print, file=log))


def run_apart(folder: Path, name: str, *, at_once: int) -> None:
    command = [sys.executable, "-m", "kedge.cli", "run", str(folder / f"{name}.yaml"), "--runs", str(folder)]
    resume = ["--resume"] if has_begun(folder / name) else []
    # Side by side, more threads in all than cores would only wait for each other.
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(
            [*command, "--no-check", *resume], stdout=out, stderr=out, env={**os.environ, **threads}, check=False
        )
    if done.returncode:
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{tail}")
