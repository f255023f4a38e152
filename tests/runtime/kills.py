"""Runs of two or three processes that are killed at a random moment, one process or all at once, and then resumed on
one, two or three: they must give what the run gives that nothing happened to.

A moment is some time after a sign of progress, so that slow machines are killed in the same parts of a run.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import crew
import failures
from safetensors.torch import load_file

from kedge.runs.folder import status_of

PATIENCE_S = 120.0
MANIFEST, METRICS = "runs/pair/run.json", "runs/pair/ppo/metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    size: int
    victims: tuple[int, ...]
    steps: int | None
    """How many steps are in the journal when the wait for the kill begins; None: the processes were just started."""
    after_s: float
    resumed_on: int
    has_launcher: bool
    """Whether somebody kills the other processes then, as `kedge run` does; without one they find out by themselves,
    once they have met: before that they wait for `placement.timeout`."""

    def __str__(self) -> str:
        who = "all" if len(self.victims) == self.size else f"process {self.victims[0]}"
        since = "the start" if self.steps is None else f"step {self.steps}"
        launcher = "launcher" if self.has_launcher else "no launcher"
        when = f"{self.after_s:.2f} s after {since}"
        return f"{self.number}: {who} of {self.size}, {when}, {launcher}, resumed on {self.resumed_on}"


def _case(number: int) -> Case:
    draw = random.Random(number)
    size = draw.choice((2, 3))
    victims = tuple(range(size)) if number % 4 == 3 else (draw.randrange(size),)
    steps = (None, 0, 1, 2, 3)[number % 5]
    return Case(
        number,
        size,
        victims,
        steps,
        draw.uniform(0.0, 0.6),
        resumed_on=(1, 2, 3)[number % 3],
        has_launcher=steps in (None, 0) or number % 2 == 0,
    )


CASES = [_case(number) for number in range(20)]


def attempt(case: Case) -> str | None:
    """None where the resumed run gives the metrics and the weights of the undisturbed one; else what went wrong."""
    after_s = case.after_s
    while True:
        with tempfile.TemporaryDirectory(prefix="kedge-kill-") as folder:
            home = Path(folder)
            if kill(case, home, after_s):
                return resumed(case, home)
        after_s /= 2  # it had ended already


def kill(case: Case, home: Path, after_s: float) -> bool:
    """Start the run and kill the victims; whether they were still running then."""
    failures.write_recipe(home)
    processes = crew.start(failures.members(home, case.size), home)
    until = time.monotonic() + PATIENCE_S
    while case.steps is not None and not _has_come_to(case.steps, home) and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(after_s)
    _kill([processes[rank] for rank in case.victims])
    if case.has_launcher:
        time.sleep(0.05)
        _kill(processes)
    codes = crew.wait(case.size, home).codes
    return any(codes[rank] == -signal.SIGKILL for rank in case.victims)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def resumed(case: Case, home: Path) -> str | None:
    """Go on with the run, or begin it where nothing was there yet, and compare it with the undisturbed one."""
    steps, since = num_steps(home), time.monotonic()
    resume = ["--resume"] if (home / MANIFEST).exists() else []
    ended = crew.run(failures.members(home, case.resumed_on, *resume), home)
    if set(ended.codes) != {0}:
        return f"killed after {steps} steps: {ended}"
    if (status := status_of(home / "runs/pair")) != "done":
        return f"killed after {steps} steps: the run is {status}"
    problem = failures.difference(failures.metrics(failures.alone()), failures.metrics(home)) or weights_differ(home)
    print(f"{case}: {steps} steps were there, {time.monotonic() - since:.1f} s more: {problem or 'held'}")
    return problem


def num_steps(home: Path) -> int:
    journal = home / METRICS
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _has_come_to(steps: int, home: Path) -> bool:
    return num_steps(home) >= steps if steps else (home / MANIFEST).exists()


def weights_differ(home: Path) -> str | None:
    file = "runs/pair/ppo/model/model.safetensors"
    expected, weights = load_file(failures.alone() / file), load_file(home / file)
    if set(expected) != set(weights):
        return f"the model has other weights: {sorted(set(expected) ^ set(weights))}"
    gap = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    return f"a weight differs by {gap:.2g}" if gap > 1e-5 else None
