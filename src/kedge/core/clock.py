"""Seconds by phase. Work on a GPU is waited for only if `wait` is given: then a lap is what it took, not its launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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
