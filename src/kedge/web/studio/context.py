"""What every page of the studio knows: the project, its processes, and what commands lend."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kedge.core.errors import DataError
from kedge.core.suggest import did_you_mean
from kedge.report.live.feed import RunFeed
from kedge.runs.folder import status_of
from kedge.web.studio.jobs import Job, Jobs
from kedge.web.studio.project import Project
from kedge.web.studio.services import Services

UPLOAD_LIMIT: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run as the first page lists it."""

    name: str
    status: str
    job: Job | None


@dataclass(slots=True, kw_only=True)
class Studio:
    project: Project
    services: Services
    jobs: Jobs
    runs_at_once: int = 1
    upload_limit: int = UPLOAD_LIMIT
    _feeds: dict[str, RunFeed] = field(default_factory=dict[str, RunFeed])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run_folder(self, name: str) -> Path:
        """The folder of a run of this project, by its name."""
        if name not in (known := self.project.run_names()):
            raise DataError(f"there is no run of that name here{did_you_mean(name, known)}")
        return self.project.inside(f"runs/{name}")

    def feed(self, name: str) -> RunFeed:
        """What is known of a run, brought up to date."""
        folder = self.run_folder(name)
        with self._lock:
            feed = self._feeds.get(name)
            if feed is None:
                feed = self._feeds[name] = RunFeed(folder)
            feed.poll()
            return feed

    def job_of(self, name: str) -> Job | None:
        """The newest process of a run."""
        return next((job for job in self.jobs.all("run") if job.name == name), None)

    def run_lines(self) -> list[RunLine]:
        """Runs, the newest first; processes that have made no folder yet before them."""
        names = self.project.run_names()
        waiting = dict.fromkeys(job.name for job in self.jobs.all("run") if job.name not in names)
        lines = [RunLine(name=name, status=self.status(name), job=self.job_of(name)) for name in waiting]
        return lines + [RunLine(name=name, status=self.status(name), job=self.job_of(name)) for name in names]

    def status(self, name: str) -> str:
        """Of a run: that of its folder, or of its process where there is no folder yet."""
        job = self.job_of(name)
        if not (self.project.runs / name / "run.json").is_file():
            if job is not None and job.is_alive:
                return "starting"
            return "failed" if job is not None else "absent"
        if job is not None and job.is_alive:
            return "stopping" if job.presses else "running"
        return status_of(self.run_folder(name))
