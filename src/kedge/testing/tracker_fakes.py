"""Fakes around trackers that record their calls: a tracker, and the clients of wandb and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kedge.core.protocols import Metrics


class RecordingTracker:
    """A tracker that keeps its metrics and events in lists."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        """Steps with their metrics."""
        self.events: list[Mapping[str, Any]] = []
        self.num_closed = 0

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.logged.append((step, dict(metrics)))

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.num_closed += 1

    @property
    def codes(self) -> list[str]:
        """The codes of the events, in order."""
        return [event["code"] for event in self.events]


class FakeWandb:
    """The module `wandb` and the run that `wandb.init` returns, in one object that takes any call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        """Name, positional and keyword arguments of each call."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> FakeWandb:
            self.calls.append((name, args, kwargs))
            return self

        return call


class FakeMlflowClient:
    """The methods of `MlflowClient` that are used; `experiments` are the ids of those that exist, by name."""

    def __init__(self, **experiments: str) -> None:
        self.experiments = experiments
        self.calls: list[tuple[Any, ...]] = []
        """Name and arguments of each call that changes something."""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("create_experiment", name))
        return "new-experiment"

    def create_run(self, experiment_id: str, *, run_name: str) -> Any:
        self.calls.append(("create_run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id: str, *, status: str) -> None:
        self.calls.append(("update_run", run_id, status))

    def log_batch(self, run_id: str, *, metrics: list[Any]) -> None:
        self.calls.append(("log_batch", run_id, metrics))

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.calls.append(("set_tag", run_id, key, value))

    def set_terminated(self, run_id: str, *, status: str) -> None:
        self.calls.append(("set_terminated", run_id, status))
