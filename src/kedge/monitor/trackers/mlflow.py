"""MLflow. Unless a server is named, a database in the run's folder: `RUN/trackers/mlflow.db` (open with `mlflow ui`).

A database, because MLflow refuses plain folders from 3.13 on. An event becomes a tag `event.CODE`: MLflow has no other
place for text that needs no artefact store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kedge.core.protocols import Metrics
from kedge.core.settings import Section
from kedge.monitor.trackers import read_settings, save_id, saved_id, tracker_folder

_TAG_LIMIT = 5000


class MlflowSettings(Section):
    experiment: str = "kedge"
    """Experiment that the run is filed under; made when it does not exist."""
    tracking_uri: str | None = None
    """Server or database; None is MLFLOW_TRACKING_URI where that is set, else a database in the run's folder."""


class MlflowTracker:
    """Logs through an `MlflowClient`; `metric` is `mlflow.entities.Metric`."""

    def __init__(self, client: Any, run_id: str, *, metric: Callable[[str, float, int, int], Any]) -> None:
        self._client = client
        self._run_id = run_id
        self._metric = metric
        self._has_failed = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        now_ms = int(time.time() * 1000)
        batch = [self._metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def event(self, event: Mapping[str, Any]) -> None:
        self._has_failed = self._has_failed or event["level"] == "fatal"
        step = event.get("step")
        text = f"{event['level']}{'' if step is None else f' at step {step}'}: {event['message']}"
        self._client.set_tag(self._run_id, f"event.{event['code']}", text[:_TAG_LIMIT])

    def close(self) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if self._has_failed else "FINISHED")


def make(run_folder: Path, name: str, settings: Mapping[str, Any]) -> MlflowTracker:
    options = read_settings(MlflowSettings, settings, tracker="mlflow")
    mlflow, entities = import_module("mlflow"), import_module("mlflow.entities")
    client = mlflow.MlflowClient(tracking_uri=tracking_uri(run_folder, options))
    return MlflowTracker(client, start(client, run_folder, name, options), metric=entities.Metric)


def tracking_uri(run_folder: Path, settings: MlflowSettings) -> str:
    server = settings.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return server or f"sqlite:///{(tracker_folder(run_folder) / 'mlflow.db').resolve()}"


def start(client: Any, run_folder: Path, name: str, settings: MlflowSettings) -> str:
    """The id of a new run, or of the one that this folder has the id of, which is set running again."""
    if run_id := saved_id(run_folder, "mlflow"):
        client.update_run(run_id, status="RUNNING")
        return run_id
    experiment = client.get_experiment_by_name(settings.experiment)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(settings.experiment)
    run_id = client.create_run(experiment_id, run_name=name).info.run_id
    save_id(run_folder, "mlflow", run_id)
    return run_id
