"""The folder of a running run, followed: a `RunFeed` keeps what it has read and reads only what was appended.

Its records are those that reports are made from, so a running run can be shown like a finished one.

A resumed run replaces its journals by shorter ones; the reader notices and starts again. Half a line waits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.core.errors import RunError
from kedge.report.run.run_records import RunRecord, StageRecord
from kedge.runs.folder import runs_in, status_of
from kedge.runs.journal import load_exact
from kedge.runs.manifest import MANIFEST_NAME, Manifest, Status, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """New records of a journal since the last read."""

    records: list[dict[str, Any]]
    is_rewound: bool
    """The journal was replaced: the records are all that there are."""


class Tail:
    """Reads one journal from where it stopped the last time, however long the file is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        """Device and number of the file that the offset belongs to."""

    def read(self) -> News:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                is_rewound = self._file is not None and (identity != self._file or status.st_size < self._offset)
                if is_rewound:
                    self._offset = 0
                self._file = identity
                file.seek(self._offset)
                appended = file.read()
        except FileNotFoundError:
            is_rewound, self._file, self._offset = self._file is not None, None, 0
            return News(records=[], is_rewound=is_rewound)
        end = appended.rfind(b"\n") + 1
        records = [self._parsed(line) for line in appended[:end].splitlines()]
        self._offset += end
        return News(records=records, is_rewound=is_rewound)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(load_exact(line))
        except (ValueError, TypeError) as error:
            raise RunError(f"{self.path}: a line is not a JSON object ({error}). Found: {line[:80]!r}.") from error


@dataclass(slots=True)
class _Lines:
    """The records of one journal up to now."""

    tail: Tail
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def poll(self) -> bool:
        news = self.tail.read()
        if news.is_rewound:
            self.records = []
        self.records.extend(news.records)
        return bool(news.records) or news.is_rewound


class StageFeed:
    """One folder with journals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.status: Status = status_of(folder)
        self._metrics = _Lines(Tail(folder / "metrics.jsonl"))
        self._events = _Lines(Tail(folder / "events.jsonl"))
        self._samples = _Lines(Tail(folder / "samples.jsonl"))

    def poll(self) -> bool:
        """Read new records; True where anything has changed."""
        before = self.status, self.manifest
        self.status = status_of(self.folder)
        self.manifest = read_manifest(self.folder)
        # all three are read, whatever the first one returns
        is_new = [lines.poll() for lines in (self._metrics, self._events, self._samples)]
        return any(is_new) or before != (self.status, self.manifest)

    def record(self) -> StageRecord:
        return StageRecord(
            folder=self.folder,
            manifest=self.manifest,
            status=self.status,
            metrics=self._metrics.records,
            events=self._events.records,
            samples=self._samples.records,
            reward_report=None,
            evaluation=None,
            missing=(),
        )


class RunFeed:
    """A pipeline, whose stages appear one after the other, or a stage on its own. `revision` counts its changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revision = 0
        self._own = StageFeed(folder)
        self._stages: dict[Path, StageFeed] = {}

    def poll(self) -> bool:
        is_new = self._own.poll()
        for child in self._children():
            if child not in self._stages:
                self._stages[child] = StageFeed(child)
                is_new = True
            is_new = self._stages[child].poll() or is_new
        self.revision += is_new
        return is_new

    def _children(self) -> list[Path]:
        """Names of stages do not change, so a manifest is read again only where a new folder has come."""
        if self._own.manifest.kind != "pipeline":
            return []
        folders = {child for child in self.folder.iterdir() if (child / MANIFEST_NAME).is_file()}
        return list(self._stages) if folders == set(self._stages) else runs_in(self.folder)

    def record(self) -> RunRecord:
        own = self._own.record()
        is_pipeline = own.kind == "pipeline"
        stages = tuple(feed.record() for feed in self._stages.values()) if is_pipeline else (own,)
        begun = {stage.manifest.stage for stage in stages}
        planned = own.settings.get("stages", {}) if is_pipeline else {}
        return RunRecord(
            folder=self.folder,
            manifest=own.manifest,
            status=own.status,
            events=own.events if is_pipeline else (),
            stages=stages,
            unstarted=tuple(name for name in planned if name not in begun),
        )
