"""Runs of two or three processes that are killed at a random moment, one process or all at once, and then resumed on
one, two or three: they must give what the run gives that nothing happened to.

A moment is some time after a sign of progress, so that slow machines are killed in the same parts of a run.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import crew
import failures
from safetensors.torch import load_file

from kedge.runs.checkpoints import Checkpoints, CheckpointSettings
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
    weights: str = "replicate"
    """How the processes hold weights until they are killed."""
    moment: str = ""
    """Where a victim kills itself while a checkpoint is written, of `MOMENTS`; else somebody kills it."""

    def __str__(self) -> str:
        who = "all" if len(self.victims) == self.size else f"process {self.victims[0]}"
        since = "the start" if self.steps is None else f"step {self.steps}"
        launcher = "launcher" if self.has_launcher else "no launcher"
        when = self.moment or f"{self.after_s:.2f} s after {since}"
        weights = ", sharded" if self.weights == "shard" else ""
        return f"{self.number}: {who} of {self.size}{weights}, {when}, {launcher}, resumed on {self.resumed_on}"


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


MOMENTS = {
    "before its parts": ("kedge.runs.shards", "save_file", False),
    "before the list of its parts": ("kedge.runs.shards", "write_json", False),
    "with its share written": ("kedge.runs.shards", "write_json", True),
    "before the tree": ("kedge.runs.state", "write_text", False),
    "before the seal": ("kedge.runs.checkpoints", "seal", False),
    "between seal and rename": ("kedge.runs.checkpoints", "seal", True),
    "just after the rename": ("kedge.runs.checkpoints", "fsync_folder", True),
}
"""Module and name of a function that a process dies before or after."""
_OF_FIRST = {"before the tree", "before the seal", "between seal and rename", "just after the rename"}
_DIE = """
import importlib, os, signal
module, checkpoints = importlib.import_module("{module}"), importlib.import_module("kedge.runs.checkpoints")
act, begin, put, where = module.{name}, checkpoints.Checkpoints._make_partial, checkpoints.Checkpoints._put_in_place, []

def dying(*arguments, **named):
    is_due = where == (["step 2", "put"] if "{name}" == "fsync_folder" else ["step 2"])
    if is_due and not {after}:
        os.kill(os.getpid(), signal.SIGKILL)
    result = act(*arguments, **named)
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

def noted(self, step):
    where[:] = [f"step {{step}}"]
    return begin(self, step)

def placed(self, *arguments):
    where.append("put")
    return put(self, *arguments)

module.{name}, checkpoints.Checkpoints._make_partial, checkpoints.Checkpoints._put_in_place = dying, noted, placed
"""


def _sharded_case(number: int) -> Case:
    """Of the first, a process dies while the checkpoint of step 2 is written; the others are killed at random."""
    draw, moment = random.Random(100 + number), [*MOMENTS][number] if number < len(MOMENTS) else ""
    size = 2 if moment else draw.choice((2, 3))
    victims = (0,) if moment in _OF_FIRST else (number % 2,) if moment else tuple(range(size))
    steps, after_s, resumed_on = draw.choice((0, 1, 2)), draw.uniform(0.0, 0.6), (2, 1, 3)[number % 3]
    return Case(number, size, victims, steps, after_s, resumed_on, has_launcher=True, weights="shard", moment=moment)


CASES = [*(_case(number) for number in range(20)), *(_sharded_case(number) for number in range(12))]


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
    members = failures.members(home, case.size, "--set", f"placement.weights={case.weights}")
    if case.moment:
        return _die(case, members, home)
    processes = crew.start(members, home)
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


def _die(case: Case, members: list[crew.Member], home: Path) -> bool:
    """Have the victim kill itself, and then the others be killed; whether all checkpoints that are there are whole."""
    module, name, after = MOMENTS[case.moment]
    [victim] = case.victims
    members[victim] = replace(members[victim], before=_DIE.format(module=module, name=name, after=after))
    processes = crew.start(members, home)
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{processes[victim]}/stat").exists() and time.monotonic() < until:
        if Path(f"/proc/{processes[victim]}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    _kill(processes)
    codes = crew.wait(case.size, home).codes
    checkpoints = Checkpoints(home / "runs/pair/ppo/checkpoints", CheckpointSettings())
    latest = checkpoints.latest()
    assert codes[victim] == -signal.SIGKILL, codes
    assert latest is not None
    assert not latest.skipped, latest.skipped
    assert latest.checkpoint.step == (2 if case.moment == "just after the rename" else 1)
    return True


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def resumed(case: Case, home: Path) -> str | None:
    """Go on with the run, or begin it where nothing was there yet, and compare it with the undisturbed one."""
    steps, since = num_steps(home), time.monotonic()
    resume = ["--resume"] if (home / MANIFEST).exists() else []
    weights = case.weights if case.resumed_on > 1 else "replicate"
    more = ["--set", f"placement.weights={weights}", *resume]
    ended = crew.run(failures.members(home, case.resumed_on, *more), home)
    if set(ended.codes) != {0}:
        return f"killed after {steps} steps: {ended}"
    if (status := status_of(home / "runs/pair")) != "done":
        return f"killed after {steps} steps: the run is {status}"
    problem = failures.difference(failures.metrics(failures.alone()), failures.metrics(home)) or weights_differ(home)
    if case.weights == "shard" and case.size == case.resumed_on == 2:
        problem = problem or bits_differ(home)
    print(f"{case}: {steps} steps were there, {time.monotonic() - since:.1f} s more: {problem or 'held'}")
    return problem


def num_steps(home: Path) -> int:
    journal = home / METRICS
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _has_come_to(steps: int, home: Path) -> bool:
    return num_steps(home) >= steps if steps else (home / MANIFEST).exists()


@cache
def undisturbed() -> Path:
    """Where two processes with sharded weights ran the recipe, and nothing happened to them."""
    home = Path(tempfile.mkdtemp(prefix="kedge-sharded-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    failures.write_recipe(home)
    ended = crew.run(failures.members(home, 2, "--set", "placement.weights=shard"), home)
    assert ended.codes == [0, 0], ended
    return home


def bits_differ(home: Path) -> str | None:
    """Whether a run that two processes began and two have ended is to the bit the one that nothing happened to."""
    if failures.metrics(home) != failures.metrics(undisturbed()):
        return "the metrics are not those of the same processes to the last bit"
    file = "runs/pair/ppo/model/model.safetensors"
    return None if (home / file).read_bytes() == (undisturbed() / file).read_bytes() else "the weights differ in bits"


def weights_differ(home: Path) -> str | None:
    file = "runs/pair/ppo/model/model.safetensors"
    expected, weights = load_file(failures.alone() / file), load_file(home / file)
    if set(expected) != set(weights):
        return f"the model has other weights: {sorted(set(expected) ^ set(weights))}"
    gap = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    return f"a weight differs by {gap:.2g}" if gap > 1e-5 else None
