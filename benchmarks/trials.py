"""Trials: what people did to break Kedge, tried again by machine, and how much of it held.

    python benchmarks/trials.py [--only kills malformed …] [--kills 100] [--seed 0]

- kills: one recipe with every kind of stage, killed (SIGKILL) at random moments and resumed, with an empty cache each
  time; metrics, events, samples, weights and files must be those of a run that nothing interrupted.
- malformed: recipes, data files, constitutions, run folders, disks and rewards that are wrong; each must be answered
  with words.
- processes: runs of several processes of which one raises, hangs, is stopped or killed; and kills of one or all of them
  at random moments, resumed on one, two or three.
- attacks: programs that try to leave the sandbox or to harm the machine.
- pages: texts of models that would run as code in a careless page, on a board and where people label; requests that
  another site or an outsider would send.
- launch: names, folders, settings and flags that would run as code, or become keys, in careless files for schedulers.
- injections: answers that try to talk a judge into a good score, or into preferring them.
- overoptimisation: the curves of ten seeds that were driven past their peak, and synthetic ones that bend, collapse,
  rise, fall or stay; what is said of them must be true.
- faults: planted faults that the doctor's rules were not written for; this is a rate, not a promise.

Prints what did not hold, line by line, then one table of tried and held. Exit code 1 where a promise did not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from kedge.runs.folder import HISTORY
from kedge.testing.commands import Kedge, forking_server

TESTS = Path(__file__).parents[1] / "tests"
MOST_SECONDS_ALIVE = 6.0
"""Of a child before it is killed: the whole recipe takes ten times as long."""

Trial = tuple[str, str | None]
"""What was tried, and what went wrong: nothing where it held."""


def load(path: Path) -> ModuleType:
    """A module of the tests, which are no package."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"trials_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Kills


@dataclass(slots=True, kw_only=True)
class Killer:
    """Chains of one recipe, killed and resumed until the kills are used up."""

    kedge: Kedge
    home: Path
    random: Random
    left: int
    launches: int = 0

    def launch(self, runs: Path) -> int:
        """Begin or resume the recipe with a cache that nobody has used."""
        self.launches += 1
        resumed = ["--resume"] if (runs / "recorded/run.json").exists() else []
        return self.kedge.start(
            *("run", self.home / "recipe.yaml", "--runs", runs, "--no-check", *resumed),
            environment={"KEDGE_CACHE": str(self.home / f"cache-{self.launches}")},
        )

    def chain(self, runs: Path) -> tuple[int, int]:
        """The exit code of a recipe that was killed at random moments until it was done, and how often it was."""
        kills = 0
        while self.left:
            process = self.launch(runs)
            time.sleep(self.random.uniform(0.05, MOST_SECONDS_ALIVE))
            code = self.kedge.kill(process)
            if code >= 0:  # it was done before
                return code, kills
            kills, self.left = kills + 1, self.left - 1
        self.launch(runs)
        return self.kedge.wait(), kills


def kills(count: int, seed: int) -> Iterator[Trial]:
    recording = load(TESTS / "parity/recording.py")
    with TemporaryDirectory() as folder, forking_server(Path(folder)) as kedge:
        home = Path(folder)
        recording.write_inputs(home)
        killer = Killer(kedge=kedge, home=home, random=Random(seed), left=0)
        code, _ = killer.chain(home / "whole")
        if code != recording.STOPPED:
            yield "a run that nothing interrupts", f"exit code {code}: {kedge.output.read_text()[-500:]}"
            return
        expected = facts_of(recording, home, home / "whole")
        killer.left, number = count, 0
        while killer.left:
            number += 1
            runs = home / f"chain-{number}"
            code, times = killer.chain(runs)
            problem = None if code == recording.STOPPED else f"exit code {code}: {kedge.output.read_text()[-500:]}"
            if problem is None:
                problem = first_difference(recording, expected, facts_of(recording, home, runs))
            # A chain is compared at its end: where it differs, none of its kills counts as held.
            yield from ((f"kill {at + 1} of {times} in chain {number}", problem) for at in range(times))


def facts_of(recording: ModuleType, home: Path, runs: Path) -> dict[str, dict[str, Any]]:
    stages = {name: dict(recording.facts(runs, runs / "recorded" / name)) for name in recording.STAGES}
    for stage in stages.values():
        stage["events"] = [event for event in stage["events"] if event["code"] not in HISTORY]
    text = json.dumps(stages).replace(str(home / runs.name), "RUNS").replace(str(home), "HOME")
    return json.loads(text)


def first_difference(recording: ModuleType, expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    for stage, facts in expected.items():
        for what, value in facts.items():
            if found[stage][what] != value:
                more, fewer = (_only_in(a, b) for a, b in ((found[stage][what], value), (value, found[stage][what])))
                lines = recording.differences(value, found[stage][what], what) or [what]
                return f"{stage}: {what}: more: {more}; missing: {fewer}" if more or fewer else f"{stage}: {lines[0]}"
    return None


def _only_in(records: Any, others: Any) -> str:
    """The first of the records that is not among the others, in short; empty where all are, or they are no list."""
    if not isinstance(records, list):
        return ""
    return next((json.dumps(record)[:200] for record in records if record not in others), "")


# Cases that stand beside their tests


def cases(*files: str) -> Iterator[Trial]:
    """Each module has `CASES` and `attempt`, which says what went wrong."""
    for file in files:
        module = load(TESTS / file)
        for case in module.CASES:
            yield name_of(case), module.attempt(case)


def name_of(case: Any) -> str:
    return str(getattr(case, "name", case)).partition("\n")[0][:80]


def unseen_faults(seed: int) -> Iterator[Trial]:
    """Runs with faults that the rules were not written for, on a seed of their own."""
    faults = load(Path(__file__).with_name("faults.py"))
    with TemporaryDirectory() as folder:
        for case in faults.CASES:
            yield name_of(case), faults.attempt(case, folder=Path(folder), seed=100 + seed)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Trial]]] = {
    "kills": lambda options: kills(options.kills, options.seed),
    "malformed": lambda _: cases(
        "recipe/malformed_recipes.py",
        "data/malformed.py",
        "runs/trouble.py",
        "commands/preflight_cases.py",
        "feedback/malformed_constitutions.py",
    ),
    "processes": lambda _: cases("runtime/failures.py", "runtime/kills.py"),
    "attacks": lambda _: cases("rewards/attacks.py"),
    "pages": lambda _: cases("board/board_attacks.py", "web/hostile_texts.py", "web/forged_requests.py"),
    "launch": lambda _: cases("launch/launch_attacks.py"),
    "injections": lambda _: cases("rewards/injections.py", "rewards/comparison_injections.py"),
    "overoptimisation": lambda _: cases("monitor/overoptimised_runs.py", "monitor/gold_curves.py"),
    "faults": lambda options: unseen_faults(options.seed),
}
RATES = ("faults",)
"""Parts that are a rate and not a promise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table: list[tuple[str, int, int, float]] = []
    for part in options.only:
        since, tried, held, last = time.monotonic(), 0, 0, None
        for name, problem in PARTS[part](options):
            tried, held = tried + 1, held + (problem is None)
            if problem is not None and problem != last:
                print(f"{part}: {name}: {problem}", flush=True)
            last = problem
        table.append((part, tried, held, time.monotonic() - since))
    print(f"\n{'trials':<18}{'tried':>8}{'held':>8}{'seconds':>10}")
    for part, tried, held, seconds in table:
        print(f"{part:<18}{tried:>8,}{held:>8,}{seconds:>10.0f}")
    return int(any(tried != held or not tried for part, tried, held, _ in table if part not in RATES))


if __name__ == "__main__":
    sys.exit(main())
