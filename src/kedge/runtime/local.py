"""All roles in one process: independent calls are made one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.core.clock import Clock


class LocalRuntime:
    """The runtime (`kedge.core.protocols.Runtime`) of a single process; `clock` times what it gathers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def gather(self, *calls: Callable[[], Any]) -> list[Any]:
        with self._clock.lap("judge"):
            return [call() for call in calls]
