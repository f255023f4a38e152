"""What processes that run a recipe together must have in common, and what they say to each other after every step.

All of them run the same program on the same numbers. Where they do not, a difference is found here and named, before
it becomes a wait without an end or a model that no single run would give.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import kedge
from kedge.core.errors import ConfigError, ProcessError
from kedge.core.files import hash_json
from kedge.core.protocols import Metrics, Tracker
from kedge.core.world import Spent, World, acting_alone, once, portable
from kedge.recipe.schema import Recipe
from kedge.stages.shared.interrupt import StopRequest

_SEEN_WITHIN_S: Final = 30.0
"""A file of another machine may take so long to show on a shared disk."""
_SEEN_HERE_WITHIN_S: Final = 1.0
"""The same on the machine that wrote it."""
_TIMED: Final = ("time/", "tokens/per_second")
"""Metrics that are read from a clock, which no two processes have alike."""


def refuse_unlike(world: World, recipe: Recipe) -> None:
    """An error on all processes where one of them has other versions or another recipe than process 0."""
    if world.size == 1:
        return
    own = {
        "Kedge": kedge.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "recipe": hash_json(recipe.resolved()),
    }
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                what = "another recipe" if name == "recipe" else f"{name} {other[name]}, and process 0 has {value}"
                raise ConfigError(
                    f"process {rank} has {what}: all processes of a run need the same versions and the same recipe"
                )


def refuse_unseen(world: World, folder: Path) -> None:
    """An error on all processes, within half a minute, where one does not see the run folder that process 0 sees."""
    if world.size == 1:
        return
    token = folder / f".seen-{world.same(secrets.token_hex(8))}"
    is_new = once(world, lambda: _write_token(token))
    host = socket.gethostname()
    wait_s = _SEEN_HERE_WITHIN_S if world.same(host) == host else _SEEN_WITHIN_S
    places = world.gather(None if _is_seen(token, wait_s) else f"{host}:{folder.absolute()}")
    once(world, lambda: _remove_token(token, is_new=is_new))
    unseen = [f"process {rank} ({place})" for rank, place in enumerate(places) if place is not None]
    if unseen:
        raise ConfigError(
            f"{folder}: not all processes see this run folder: {', '.join(unseen)}; start all of them in the same "
            "folder, on a disk that all machines share (kedge run --runs), and nothing was started"
        )


def _write_token(token: Path) -> bool:
    """Gives whether the folder had to be made."""
    is_new = not token.parent.exists()
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    return is_new


def _remove_token(token: Path, *, is_new: bool) -> None:
    token.unlink(missing_ok=True)
    if is_new:
        with suppress(OSError):
            token.parent.rmdir()


def _is_seen(token: Path, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            os.listdir(token.parent)  # a network disk looks again
        if token.exists():
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


class SharedTracker:
    """One tracker for all processes: that of process 0, which the others do not have.

    After every step they compare what they logged, and agree on whether to stop. Where the time between two steps went
    is written with the later one; before the first one models and data were read.
    """

    def __init__(self, world: World, inner: Tracker | None, stop: StopRequest) -> None:
        self._world = world
        self._inner = inner
        self._stop = stop
        self._has_logged = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        spent = time_metrics(self._world.spent()) if self._has_logged else self._begin()
        error = self._log_here({**metrics, **spent}, step)
        values = {name: _plain(value) for name, value in sorted(metrics.items()) if not name.startswith(_TIMED)}
        told = None if error is None else portable(error)
        reports = self._world.gather((hash_json(values), self._stop.is_asked_here, told))
        if error is not None:
            raise error
        if (first_error := reports[0][2]) is not None:
            raise first_error
        self._stop.agree(is_asked for _, is_asked, _ in reports)
        if len({digest for digest, _, _ in reports}) > 1:
            raise ProcessError(f"step {step}: {_difference(self._world.gather(values))}")

    def event(self, event: Mapping[str, Any]) -> None:
        once(self._world, lambda: self._inner.event(event) if self._inner else None)

    def close(self) -> None:
        """The tracker of process 0 is closed by who opened it."""

    def _begin(self) -> dict[str, float]:
        self._world.spent()
        self._has_logged = True
        return {}

    def _log_here(self, metrics: Metrics, step: int) -> BaseException | None:
        if self._inner is None:
            return None
        try:
            with acting_alone():
                self._inner.log(metrics, step=step)
        except BaseException as error:
            return error
        return None


def time_metrics(spent: Sequence[Spent]) -> dict[str, float]:
    """Seconds that each process was busy, communicated and waited, by rank, the means of the last two, and the memory
    that each GPU has taken at its peak.

    >>> spent = [Spent(busy=8.0, communicating=1.0, waiting=1.0), Spent(busy=6.0, communicating=1.0, waiting=3.0)]
    >>> metrics = time_metrics(spent)
    >>> metrics["time/busy/1"], metrics["time/wait/1"], metrics["time/wait"]
    (6.0, 3.0, 2.0)
    """
    if not spent:  # one process alone waits for nobody
        return {}
    metrics = {
        "time/communicate": fmean(process.communicating for process in spent),
        "time/wait": fmean(process.waiting for process in spent),
    }
    for rank, process in enumerate(spent):
        metrics |= {
            f"time/busy/{rank}": process.busy,
            f"time/communicate/{rank}": process.communicating,
            f"time/wait/{rank}": process.waiting,
        }
        if process.memory_peak:
            metrics[f"gpu/{rank}/memory_peak"] = process.memory_peak
    return metrics


def _plain(value: Any) -> str:
    """A number to its last bit; what is none is refused by the journal."""
    try:
        return repr(float(value))
    except (TypeError, ValueError, RuntimeError):
        return repr(value)


def _difference(by_rank: list[dict[str, str]]) -> str:
    """
    >>> _difference([{"kl/mean": "0.5", "reward/mean": "0.12"}, {"kl/mean": "0.5", "reward/mean": "0.13"}])
    'the processes do not agree: process 1 saw reward/mean 0.13, process 0 saw 0.12; what differs between them changes \
the model: a reward that depends on the process, its random numbers or its clock, or unlike machines'
    """
    first = by_rank[0]
    for rank, values in enumerate(by_rank):
        for name in sorted({*first, *values}):
            if values.get(name) != first.get(name):
                saw = f"process {rank} saw {name} {values.get(name, 'not at all')}, process 0 saw "
                return (
                    f"the processes do not agree: {saw}{first.get(name, 'it not')}; what differs between them changes "
                    "the model: a reward that depends on the process, its random numbers or its clock, or unlike "
                    "machines"
                )
    return "the processes do not agree"
