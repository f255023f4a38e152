"""Weights & Biases. Offline unless the recipe says `mode: online`: nothing leaves the machine unasked.

An offline run lies below `RUN/trackers/wandb/` and is uploaded with `wandb sync`. Events of level info stay in
events.jsonl; warnings and worse become alerts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from kedge.core.protocols import Metrics
from kedge.core.settings import Section
from kedge.monitor.trackers import read_settings, save_id, saved_id, tracker_folder

_ALERT_LEVELS = {"warning": "WARN", "fatal": "ERROR"}


class WandbSettings(Section):
    project: str = "kedge"
    """Project that the run is filed under."""
    entity: str | None = None
    """User or team; None is the account's default."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = ()
    """Labels to filter by."""
    mode: Literal["offline", "online"] = "offline"
    """`online` sends while the run goes on and needs a login."""


class WandbTracker:
    """Logs to a started run of wandb (what `wandb.init` returns)."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._has_failed = False
        # wandb ignores a step lower than the last one. After a resume that would lose data, so the step is a metric
        # of its own that all others are plotted against.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def event(self, event: Mapping[str, Any]) -> None:
        self._has_failed = self._has_failed or event["level"] == "fatal"
        if level := _ALERT_LEVELS.get(event["level"]):
            self._run.alert(title=event["code"], text=event["message"], level=level)

    def close(self) -> None:
        self._run.finish(exit_code=int(self._has_failed))


def make(run_folder: Path, name: str, settings: Mapping[str, Any]) -> WandbTracker:
    options = read_settings(WandbSettings, settings, tracker="wandb")
    return WandbTracker(start(import_module("wandb"), run_folder, name, options))


def start(wandb: Any, run_folder: Path, name: str, settings: WandbSettings) -> Any:
    """Start a new run, or resume the one that this folder has the id of."""
    run_id = saved_id(run_folder, "wandb")
    if run_id is None:
        run_id = uuid4().hex[:12]
        save_id(run_folder, "wandb", run_id)
    return wandb.init(
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=list(settings.tags),
        mode=settings.mode,
        name=name,
        id=run_id,
        resume="allow" if settings.mode == "online" else None,  # offline, wandb would only warn that it cannot resume
        dir=str(tracker_folder(run_folder)),
    )
