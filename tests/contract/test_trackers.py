"""The contract of trackers (`kedge.testing.contracts.trackers`) on ours, and proof that it catches those that break it.

wandb and MLflow are not installed for the tests: their trackers take the client, so a fake stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kedge.core.plugins import names
from kedge.core.protocols import Metrics, Tracker
from kedge.monitor.alerts import Alerts, AlertSettings
from kedge.monitor.trackers import Fanout, mlflow, tensorboard, wandb
from kedge.monitor.trackers.forwarding import ForwardingTracker
from kedge.runs import Run, RunTracker, new_manifest
from kedge.testing.contracts.trackers import LoggedValue, TrackerContract
from kedge.testing.tracker_fakes import FakeMlflowClient, FakeWandb, RecordingTracker


def recorded(tracker: RecordingTracker) -> list[LoggedValue]:
    return [(step, name, value) for step, metrics in tracker.logged for name, value in metrics.items()]


class TestRunTracker(TrackerContract):
    @pytest.fixture(autouse=True)
    def close_run(self) -> Iterator[None]:
        yield
        self.run.close()

    def make(self, folder: Path) -> Tracker:
        self.run = Run.create(folder / "run", manifest=new_manifest(name="hh", kind="ppo", seed=1, settings={}))
        return RunTracker(self.run)

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        rows = self.run.read_metrics()
        return [(row["step"], name, row[name]) for row in rows for name in row if name not in ("step", "at")]


class TestTensorBoard(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        return tensorboard.make(folder, "hh/ppo", {})

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        file = EventAccumulator(str(folder / "trackers" / "tensorboard")).Reload()
        return [(row.step, name, row.value) for name in file.Tags()["scalars"] for row in file.Scalars(name)]


class TestWandb(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        self.client = FakeWandb()
        return wandb.WandbTracker(self.client)

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        rows: list[dict[str, float]] = [args[0] for name, args, _ in self.client.calls if name == "log"]
        return [(int(row["step"]), name, row[name]) for row in rows for name in row if name != "step"]


class TestMlflow(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        self.client = FakeMlflowClient()
        return mlflow.MlflowTracker(self.client, "r1", metric=lambda name, value, _time_ms, step: (step, name, value))

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        return [metric for name, *args in self.client.calls if name == "log_batch" for metric in args[1]]


class TestForwarding(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        self.inner = RecordingTracker()
        return ForwardingTracker(self.inner)

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        return recorded(self.inner)


class TestFanout(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        self.own, self.other = RecordingTracker(), RecordingTracker()
        return Fanout(self.own, {"other": self.other})

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        assert repr(recorded(self.own)) == repr(recorded(self.other))  # NaN is not equal to itself
        return recorded(self.own)


class TestAlerts(TrackerContract):
    """With a command that fails, so that closing has failures to report."""

    def make(self, folder: Path) -> Tracker:
        self.inner = RecordingTracker()
        settings = AlertSettings.model_validate({"level": "fatal", "commands": [{"run": ["/no/such/program"]}] * 2})
        return Alerts(self.inner, settings, run="hh/ppo")

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        return recorded(self.inner)

    def test_closing_twice_reports_failures_once(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.event({"level": "fatal", "code": "run.failed", "message": "disk full"})
        tracker.close()
        tracker.close()
        assert self.inner.codes == ["run.failed", "alerts.failed", "alerts.undelivered"]


class RaisesOnNan(RecordingTracker):
    def log(self, metrics: Metrics, *, step: int) -> None:
        if any(math.isnan(value) for value in metrics.values()):
            raise ValueError("NaN is not JSON")
        super().log(metrics, step=step)


class DropsNan(RecordingTracker):
    """Throws away the whole step."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        if all(math.isfinite(value) for value in metrics.values()):
            super().log(metrics, step=step)


class AddsStep(RecordingTracker):
    def log(self, metrics: Any, *, step: int) -> None:
        super().log(metrics, step=step)
        metrics["step"] = step


class KeepsReference(RecordingTracker):
    def log(self, metrics: Any, *, step: int) -> None:
        self.logged.append((step, metrics))


class OnlyForwards(RecordingTracker):
    """Ignores steps that are not later than the last, as wandb does."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        if not self.logged or step > self.logged[-1][0]:
            super().log(metrics, step=step)


class NeedsStep(RecordingTracker):
    def event(self, event: Mapping[str, Any]) -> None:
        super().event({**event, "step": int(event["step"])})


class ShortMessages(RecordingTracker):
    def event(self, event: Mapping[str, Any]) -> None:
        if len(event["message"]) > 5000:
            raise ValueError("tag too long")


class PopsEvidence(RecordingTracker):
    def event(self, event: Any) -> None:
        event.pop("evidence", None)


class ClosesOnce(RecordingTracker):
    def close(self) -> None:
        super().close()
        if self.num_closed > 1:
            raise OSError("the file is closed")


class Decides(RecordingTracker):
    def log(self, metrics: Metrics, *, step: int) -> Any:
        super().log(metrics, step=step)
        return metrics.get("kl/mean", 0.0) > 10


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (RaisesOnNan, {"numbers_that_are_not_finite"}),
        (DropsNan, {"numbers_that_are_not_finite"}),
        (AddsStep, {"what_it_is_given", "any_mapping"}),
        (KeepsReference, {"later_changes"}),
        (OnlyForwards, {"a_step_may_be_logged_in_parts", "steps_may_go_back"}),
        (NeedsStep, {"events_of_all_levels"}),
        (ShortMessages, {"messages_may_be_long"}),
        (PopsEvidence, {"what_it_is_given", "any_mapping"}),
        (ClosesOnce, {"closing_twice"}),
        (Decides, {"it_answers_nothing"}),
        (RecordingTracker, set()),
    ],
)
def test_the_contract_catches(make: type[RecordingTracker], broken: set[str], tmp_path: Path) -> None:
    class Contract(TrackerContract):
        def make(self, folder: Path) -> Tracker:
            self.tracker = make()
            return self.tracker

        def logged(self, folder: Path) -> Iterable[LoggedValue]:
            return recorded(self.tracker)

    failed: set[str] = set()
    for name in dir(TrackerContract):
        if name.startswith("test_"):
            try:
                getattr(Contract(), name)(tmp_path)
            except Exception:
                failed.add(name.removeprefix("test_"))
    assert len(failed) == len(broken)
    assert all(any(name.startswith(start) for start in broken) for name in failed)


def test_every_tracker_with_an_entry_point_is_held_to_the_contract() -> None:
    assert set(names("trackers")) == {"tensorboard", "wandb", "mlflow"}
