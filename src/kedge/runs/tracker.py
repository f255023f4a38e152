"""A run's own journals as a tracker: always there, and an error of it is an error of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.core.protocols import Metrics
from kedge.runs.folder import Run

_FIELDS = ("level", "code", "message", "step", "evidence")


class RunTracker:
    """`kedge.core.protocols.Tracker` over `metrics.jsonl` and `events.jsonl`. Closing it leaves the run open."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._run.log(metrics, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """An event as `Run.event` takes it, or a finding as a dict, whose other fields become evidence."""
        others = {name: value for name, value in event.items() if name not in _FIELDS and value}
        evidence = {**others, **event.get("evidence", {})}
        self._run.event(event["level"], event["code"], event["message"], event.get("step"), **evidence)

    def close(self) -> None:
        pass
