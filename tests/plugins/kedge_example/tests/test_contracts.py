"""What Kedge expects of each part, checked by the contracts that it ships."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kedge_example.lines import make
from kedge_example.median import MEDIAN
from kedge_example.short_prompts import STAGE

from kedge.core.protocols import Tracker
from kedge.testing.contracts.group_methods import GroupMethodContract
from kedge.testing.contracts.stages import StageContract
from kedge.testing.contracts.trackers import LoggedValue, TrackerContract


class TestShortPrompts(StageContract):
    stage = STAGE
    values: ClassVar = {"kind": "short_prompts", "data": "prompts.jsonl"}


class TestMedian(GroupMethodContract):
    method = MEDIAN


class TestLines(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        return make(folder, "run/stage", {})

    def logged(self, folder: Path) -> list[LoggedValue]:
        """Steps, names and values that it was given, read back from where it put them."""
        rows = [line.split() for line in (folder / "trackers/lines.txt").read_text().splitlines()]
        return [(int(row[0]), row[1], float(row[2])) for row in rows if len(row) == 3]
