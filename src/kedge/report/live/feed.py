"""The folder of a running run, followed: a `RunFeed` keeps what it has read and reads only what was appended.

Its records are those that reports are made from, so a running run can be shown like a finished one.

A resumed run replaces its journals by shorter ones; the reader notices and starts again. Half a line waits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kedge.report.rounds.records import rounds_below
from kedge.report.run.run_records import RunRecord, StageRecord
from kedge.runs.folder import runs_in, status_of
from kedge.runs.manifest import MANIFEST_NAME, ROUNDS, Manifest, Status, read_manifest
from kedge.runs.reading import MetricFeed, RecordFeed


class StageFeed:
    """One folder with journals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.status: Status = status_of(folder)
        self._metrics = MetricFeed(folder / "metrics.jsonl")
        self._events = RecordFeed(folder / "events.jsonl")
        self._samples = RecordFeed(folder / "samples.jsonl")

    def poll(self) -> bool:
        """Read new records; True where anything has changed."""
        before = self.status, self.manifest
        self.status = status_of(self.folder)
        self.manifest = read_manifest(self.folder)
        # all three are read, whatever the first one returns
        is_new = [journal.poll() for journal in (self._metrics, self._events, self._samples)]
        return any(is_new) or before != (self.status, self.manifest)

    def record(self) -> StageRecord:
        return StageRecord(
            folder=self.folder,
            manifest=self.manifest,
            status=self.status,
            metrics=self._metrics.table,
            events=self._events.records,
            samples=self._samples.records,
            reward_report=None,
            evaluation=None,
            missing=(),
        )


class RunFeed:
    """A pipeline, whose stages appear one after the other, or a stage on its own; of several rounds, the newest.
    `revision` counts its changes."""

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
        pipeline = self._pipeline()
        if pipeline is None:
            return []
        folders = {child for child in pipeline.iterdir() if (child / MANIFEST_NAME).is_file()}
        if folders != set(self._stages):
            self._stages = {child: feed for child, feed in self._stages.items() if child in folders}
            return runs_in(pipeline)
        return list(self._stages)

    def _pipeline(self) -> Path | None:
        """The folder whose stages are shown: that of the newest round where there are several; None for a stage."""
        if self._own.manifest.kind != ROUNDS:
            return self.folder if self._own.manifest.kind == "pipeline" else None
        return next(reversed(rounds_below(self.folder)), None)

    def record(self) -> RunRecord:
        own = self._own.record()
        is_pipeline = own.kind in ("pipeline", ROUNDS)
        manifest = own.manifest
        if own.kind == ROUNDS and (newest := self._pipeline()) is not None:
            of_round = read_manifest(newest)
            manifest = replace(of_round, name=f"{of_round.name}/{newest.name}")
        stages = tuple(feed.record() for feed in self._stages.values()) if is_pipeline else (own,)
        begun = {stage.manifest.stage for stage in stages}
        planned = manifest.settings.get("stages", {}) if is_pipeline else {}
        return RunRecord(
            folder=self.folder,
            manifest=manifest,
            status=own.status,
            events=own.events if is_pipeline else (),
            stages=stages,
            unstarted=tuple(name for name in planned if name not in begun),
        )
