"""All roles in one process: independent calls are made one after the other; and seconds by phase (`Clock`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar


class LocalRuntime:
    """The runtime (`kedge.core.protocols.Runtime`) of a single process; `clock` times what it gathers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def gather(self, *calls: Callable[[], Any]) -> list[Any]:
        with self._clock.lap("judge"):
            return [call() for call in calls]


T = TypeVar("T")


class Clock:
    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self._laps: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def lap(self, name: str) -> Generator[None]:
        start = self._now()
        yield
        self._laps[name] = self._laps.get(name, 0.0) + self._now() - start

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
        now = self._now()
        laps, self._laps = self._laps | {"step": now - self._since}, {}
        self._since = now
        return laps

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()
