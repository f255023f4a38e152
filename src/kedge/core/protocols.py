"""Who answers: the roles and parts as protocols of two or three verbs each. No base classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Where metrics and events go while a run goes on. A tracker never decides anything."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
