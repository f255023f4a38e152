"""All roles in one process: independent calls are made one after the other; and seconds by phase (`Clock`).

A timed role or source is one whose calls are laps of a clock, by names of their own: `time/<role>_<verb>` in metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kedge.core.optimiser import Per
from kedge.core.protocols import (
    CriticRole,
    Metrics,
    Phase,
    PolicyLoss,
    PolicyRole,
    ReferenceRole,
    RewardSource,
    ValueLoss,
)
from kedge.core.records import Experience, Rollouts, ValueTargets


class LocalRuntime:
    """The runtime (`kedge.core.protocols.Runtime`) of a single process; `clock` times what it gathers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def gather(self, *calls: Callable[[], Any], phase: Phase = "judge") -> list[Any]:
        if phase != "judge":
            return [call() for call in calls]
        with self._clock.lap("judge"):
            return [call() for call in calls]


T = TypeVar("T")


class Clock:
    """Seconds by phase; phases may be inside of each other.

    A GPU says itself when a phase began and ended in its queue of work, so that nothing has to wait for it until the
    laps are read.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._laps: list[tuple[str, Any, Any]] = []
        self._since = time.perf_counter()

    @contextmanager
    def lap(self, name: str) -> Generator[None]:
        start = self._mark()
        try:
            yield
        finally:
            self._laps.append((name, start, self._mark()))

    def each(self, items: Iterable[T], name: str) -> Iterator[T]:
        """The same items; the time it takes to come by them is a lap."""
        iterator = iter(items)
        while True:
            with self.lap(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take(self) -> dict[str, float]:
        """All laps since the last time, and the whole time as `step`; then it starts again."""
        if self._on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds: dict[str, float] = {}
        for name, start, end in self._laps:
            lasted = start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            seconds[name] = seconds.get(name, 0.0) + lasted
        seconds["step"] = now - self._since
        self._laps.clear()
        self._since = now
        return seconds

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = cast(Any, torch.cuda).Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class TimedReward:
    source: RewardSource
    clock: Clock
    name: str = "reward"

    def score(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap(f"{self.name}_score"):
            return self.source.score(rollouts)


@dataclass(frozen=True, slots=True)
class TimedReference:
    role: ReferenceRole
    clock: Clock

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("reference_logprobs"):
            return self.role.logprobs(rollouts)


@dataclass(frozen=True, slots=True)
class TimedPolicy:
    role: PolicyRole
    clock: Clock

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("policy_logprobs"):
            return self.role.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics:
        with self.clock.lap("policy_update"):
            return self.role.update(experience, loss, per=per)


@dataclass(frozen=True, slots=True)
class TimedCritic:
    role: CriticRole
    clock: Clock

    def values(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("critic_values"):
            return self.role.values(rollouts)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> Metrics:
        with self.clock.lap("critic_update"):
            return self.role.update(targets, loss, per=per)
