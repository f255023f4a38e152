"""Tracker `lines`: metrics and events as lines of text, for grep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.core.protocols import Metrics
from kedge.monitor.trackers import tracker_folder


class LinesTracker:
    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._file.writelines(f"{step} {name} {value}\n" for name, value in metrics.items())

    def event(self, event: Mapping[str, Any]) -> None:
        self._file.write(f"{event['level']} {event['code']}\n")

    def close(self) -> None:
        self._file.close()


def make(run_folder: Path, name: str, settings: Mapping[str, Any]) -> LinesTracker:
    """`settings` is what the recipe says below `trackers.lines`; `name` is that of the run and its stage."""
    return LinesTracker(tracker_folder(run_folder) / settings.get("file", "lines.txt"))
