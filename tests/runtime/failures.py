"""What can go wrong with one of two processes: each case breaks one, and `attempt` says whether all ended as they must.

The recipe's reward function breaks the process, by the rank that the launcher gave it.
"""

from __future__ import annotations

import atexit
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import crew
from crew import Ended, Member

from kedge.runs.folder import status_of

RECIPE = """
kedge: 1
name: pair
model: tiny
seed: 3
device: cpu
stages:
  ppo:
    kind: ppo
    reward: {kind: function, path: "reward.py:score"}
    prompts: prompts.jsonl
    iterations: 3
    batch: 4
    answers: 2
    minibatches: 2
    max_prompt_tokens: 32
    sampling: {max_new_tokens: 6}
    checkpoints: {every: 1}
"""
REWARD = """
import os, signal, time
from pathlib import Path

calls = 0

def score(answers):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 2:
        PLANTED
    return [float(len(set(answer.text))) for answer in answers]
"""
PROMPTS = "".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(12))


def write_recipe(home: Path, planted: str = "pass") -> Path:
    home.mkdir(parents=True, exist_ok=True)
    (home / "prompts.jsonl").write_text(PROMPTS)
    (home / "reward.py").write_text(REWARD.replace("PLANTED", planted))
    (home / "r.yaml").write_text(RECIPE)
    return home / "r.yaml"


def members(home: Path, size: int, *more: str, before: str = "") -> list[Member]:
    """The processes of a run in `home`; one alone has no launcher."""
    environments = crew.by_torchrun(size) if size > 1 else [{}]
    arguments = ["run", "r.yaml", "--no-check", *more]
    return [Member(home, arguments, environment, before) for environment in environments]


def metrics(home: Path) -> list[dict[str, float]]:
    return lines_of(home / "runs/pair/ppo/metrics.jsonl")


def lines_of(journal: Path) -> list[dict[str, float]]:
    """The metrics of a stage without what a clock says."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    timed = ("time/", "tokens/per_second", "at")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def difference(left: list[dict[str, float]], right: list[dict[str, float]]) -> str | None:
    """Where two runs differ by more than the order of sums explains; None where they do not."""
    if [line["step"] for line in left] != [line["step"] for line in right]:
        return f"steps {[line['step'] for line in left]} and {[line['step'] for line in right]}"
    for one, other in zip(left, right, strict=True):
        for name in {*one, *other}:
            before, after = one.get(name), other.get(name)
            is_close = before is not None and after is not None and abs(before - after) <= 1e-4 + 1e-3 * abs(before)
            if not is_close:
                return f"step {one['step']}: {name} is {before} and {after}"
    return None


@cache
def alone() -> Path:
    """Where a single process ran the recipe, and nothing happened to it."""
    home = Path(tempfile.mkdtemp(prefix="kedge-alone-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    write_recipe(home)
    ended = crew.run(members(home, 1), home)
    assert ended.codes == [0], ended
    return home


def resumed_equals(home: Path, size: int) -> str | None:
    """Go on with the run on so many processes; what differs from the run that nothing happened to."""
    ended = crew.run(members(home, size, "--resume"), home)
    if set(ended.codes) != {0}:
        return f"resumed on {size}: {ended}"
    return difference(metrics(alone()), metrics(home))


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    planted: str
    """What process 1 does in its second call of the reward function."""
    held: Callable[[Ended, Path], str | None]
    """What is not as it must be, after all have ended."""
    settings: tuple[str, ...] = ()
    before: str = ""
    """What process 1 runs before the command."""


def _raised(ended: Ended, home: Path) -> str | None:
    if ended.codes != [2, 2]:
        return f"exit codes {ended.codes}, not that of a DataError"
    if ended.err[0] != "error: process 1: planted\n":
        return f"the user reads {ended.err[0]!r}"
    if ended.err[1]:
        return f"process 1 speaks too: {ended.err[1]!r}"
    return None if status_of(home / "runs/pair") == "failed" else f"status {status_of(home / 'runs/pair')}"


def _raised_reward(ended: Ended, home: Path) -> str | None:
    """Process 1 wants to save before it ends, and meets process 0 at something else."""
    if ended.codes != [1, 1] or ended.err[0] != "error: process 1: planted\n":
        return f"{ended}"
    return None


def _hung(ended: Ended, home: Path) -> str | None:
    if ended.codes[0] != 1:
        return f"exit codes {ended.codes}"
    if "process 1 (is at work elsewhere) kept the others waiting for more than 3 s" not in ended.err[0]:
        return f"the user reads {ended.err[0]!r}"
    stacks = {file.name: file.read_text() for file in (home / "runs/pair/stacks").iterdir()}
    if set(stacks) != {"rank-0.txt", "rank-1.txt"} or "in score" not in stacks["rank-1.txt"]:
        return f"stacks: {stacks}"
    return None


def _killed(ended: Ended, home: Path) -> str | None:
    if ended.codes != [76, -signal.SIGKILL]:
        return f"exit codes {ended.codes}"
    if status_of(home / "runs/pair") != "interrupted":
        return f"status {status_of(home / 'runs/pair')}"
    return resumed_equals(home, 1)


def _stopped(ended: Ended, home: Path) -> str | None:
    if ended.codes != [130, 130] or "stopped at step 2, which is saved" not in ended.out[0]:
        return f"{ended}"
    if [line["step"] for line in metrics(home)] != [1, 2]:
        return f"steps {[line['step'] for line in metrics(home)]}"
    return resumed_equals(home, 2)


_RAISING = """
from kedge.core.errors import {error}
from kedge.stages.rl.journal import IterationJournal
write, calls = IterationJournal.write, []

def broken(self, *arguments):
    calls.append(0)
    if len(calls) == 2:
        raise {error}("planted")
    return write(self, *arguments)

IterationJournal.write = broken
"""
STOPPING = """
import os, signal
from kedge.stages.rl.journal import IterationJournal
write = IterationJournal.write

def stopping(self, *arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return write(self, *arguments)

IterationJournal.write = stopping
"""
"""A process that is asked to stop in every iteration: it ends after the first."""
SUICIDE = "os.kill(os.getpid(), signal.SIGKILL)"
CASES = [
    Case("raises", "pass", _raised, before=_RAISING.format(error="DataError")),
    Case("raises what others save for", "pass", _raised_reward, before=_RAISING.format(error="RewardError")),
    Case("hangs", "time.sleep(3600)", _hung, ("placement.timeout=3",)),
    Case("is killed", f'Path("done").exists() or (Path("done").touch(), {SUICIDE})', _killed),
    Case("is asked to stop", "os.kill(os.getpid(), signal.SIGTERM)", _stopped),
]

_IN_A_PASS = """
import os, signal, time
from kedge.core.errors import DataError
from kedge.models.forward import sharding
compute, calls = sharding.computing, []

def score(*arguments):
    calls.append(0)
    if len(calls) == 30 and not os.path.exists("done"):
        open("done", "w").close()
        PLANTED
    return compute(*arguments)

sharding.computing = score
"""
"""Process 1 breaks while the others wait for its part of the weights."""


def _sharded(name: str, planted: str, held: Callable[[Ended, Path], str | None], *settings: str) -> Case:
    before = _IN_A_PASS.replace("PLANTED", planted)
    return Case(f"{name} in a pass", "pass", held, ("placement.weights=shard", *settings), before)


SHARDED = [
    _sharded("raises", 'raise DataError("planted")', _raised),
    _sharded("hangs", "time.sleep(3600)", _hung, "placement.timeout=3"),
    _sharded("is killed", SUICIDE, _killed),
    Case("is asked to stop", "os.kill(os.getpid(), signal.SIGTERM)", _stopped, ("placement.weights=shard",)),
]


def attempt(case: Case) -> str | None:
    """None where the run ended as it must; else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        home = Path(folder)
        write_recipe(home, case.planted)
        sets = [part for setting in case.settings for part in ("--set", setting)]
        since = time.monotonic()
        first, second = members(home, 2, *sets)
        ended = crew.run([first, replace(second, before=case.before)], home)
        seconds = time.monotonic() - since
        return f"it took {seconds:.0f} s" if seconds > 60 else case.held(ended, home)
