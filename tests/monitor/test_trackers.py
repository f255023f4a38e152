"""Trackers: names and numbers arrive, resumed runs go on under the same name, and a failing one never harms a run.

wandb and mlflow are not installed for the tests: their classes take the client, so a small fake stands in for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kedge.core import plugins
from kedge.core.errors import ConfigError, PluginError
from kedge.core.protocols import Metrics, Tracker
from kedge.monitor.trackers import Fanout, mlflow, open_trackers, tensorboard, wandb
from kedge.testing.tracker_fakes import FakeMlflowClient, FakeWandb, RecordingTracker

WARNING = {"level": "warning", "code": "kl.high", "message": "KL is 7.1 nats", "step": 3, "evidence": {"kl": 7.1}}


class Broken(RecordingTracker):
    """A tracker whose server is gone from one verb on."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb
        self.calls = 0

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._maybe_fail("log")

    def event(self, event: Mapping[str, Any]) -> None:
        self._maybe_fail("event")

    def close(self) -> None:
        self._maybe_fail("close")

    def _maybe_fail(self, verb: str) -> None:
        self.calls += 1
        if verb == self.verb:
            raise ConnectionError("server is gone")


def install(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """Make entry points known as an installed package would."""
    points = {name: EntryPoint(name, target, "kedge.trackers") for name, target in targets.items()}
    monkeypatch.setattr(plugins, "_installed", lambda kind: points)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    file = EventAccumulator(str(folder / "trackers" / "tensorboard")).Reload()
    return {tag: [(item.step, item.value) for item in file.Scalars(tag)] for tag in file.Tags()["scalars"]}


def test_everything_reaches_everyone() -> None:
    own, other = RecordingTracker(), RecordingTracker()
    fanout: Tracker = Fanout(own, {"other": other})
    fanout.log({"reward/mean": 0.5}, step=3)
    fanout.event(WARNING)
    fanout.close()

    for tracker in (own, other):
        assert tracker.logged == [(3, {"reward/mean": 0.5})]
        assert tracker.events == [WARNING]
        assert tracker.num_closed == 1


@pytest.mark.parametrize(("verb", "calls"), [("log", 1), ("event", 3), ("close", 5)])
def test_a_failing_tracker_is_reported_once_and_left_out(verb: str, calls: int) -> None:
    own, broken, healthy = RecordingTracker(), Broken(verb), RecordingTracker()
    fanout = Fanout(own, {"broken": broken, "healthy": healthy})
    for step in (1, 2):
        fanout.log({"loss": 0.5 / step}, step=step)
    for step in (2, 3):
        fanout.event(WARNING | {"step": step})
    fanout.close()

    assert broken.calls == calls
    assert own.logged == healthy.logged == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
    [report] = [event for event in own.events if event["code"] == "tracker.failed"]
    assert report["level"] == "warning"
    assert report["step"] == {"log": 1, "event": 2, "close": None}[verb]
    assert report["evidence"] == {"tracker": "broken", "error": "ConnectionError: server is gone"}
    assert "'broken' failed and is left out from here on" in report["message"]
    assert len(healthy.events) == 2
    assert (own.num_closed, healthy.num_closed) == (1, 1)


def test_a_failure_of_the_runs_own_journal_is_a_failure_of_the_run() -> None:
    other = RecordingTracker()
    fanout = Fanout(Broken("log"), {"other": other})
    with pytest.raises(ConnectionError, match="server is gone"):
        fanout.log({"loss": 1.0}, step=1)
    assert other.logged == []


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    tracker: Tracker = tensorboard.make(tmp_path, "hh/ppo", {"flush_s": 1})
    tracker.log({"reward/mean": 0.5, "kl/mean": -0.25}, step=1)
    tracker.log({"reward/mean": float("inf")}, step=2)
    tracker.event(WARNING)
    tracker.close()

    assert scalars(tmp_path) == {"reward/mean": [(1, 0.5), (2, float("inf"))], "kl/mean": [(1, -0.25)]}
    file = EventAccumulator(str(tmp_path / "trackers" / "tensorboard")).Reload()
    [text] = file.Tensors("events/warning")
    assert text.step == 3
    assert list(text.tensor_proto.string_val) == [b"**warning** `kl.high` KL is 7.1 nats"]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    for steps, value in (((1, 2, 3, 4), 1.0), ((3, 4, 5), 2.0)):
        tracker = tensorboard.make(tmp_path, "hh", {})
        for step in steps:
            tracker.log({"loss": value}, step=step)
        tracker.close()

    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]}


def test_wandb_gets_metrics_against_a_step_of_their_own() -> None:
    fake = FakeWandb()
    tracker: Tracker = wandb.WandbTracker(fake)
    tracker.log({"reward/mean": 0.5}, step=3)
    tracker.event(WARNING)
    tracker.event({"level": "info", "code": "run.resumed", "message": "on we go"})
    tracker.close()

    assert fake.calls == [
        ("define_metric", ("step",), {}),
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"reward/mean": 0.5, "step": 3},), {}),
        ("alert", (), {"title": "kl.high", "text": "KL is 7.1 nats", "level": "WARN"}),
        ("finish", (), {"exit_code": 0}),
    ]


def test_wandb_ends_as_failed_after_a_fatal_event() -> None:
    fake = FakeWandb()
    tracker = wandb.WandbTracker(fake)
    tracker.event(WARNING | {"level": "fatal"})
    tracker.event(WARNING)
    tracker.close()

    assert [call[2]["level"] for call in fake.calls if call[0] == "alert"] == ["ERROR", "WARN"]
    assert fake.calls[-1] == ("finish", (), {"exit_code": 1})


def test_wandb_is_offline_unless_asked_and_resumes_by_id(tmp_path: Path) -> None:
    fake = FakeWandb()
    wandb.start(fake, tmp_path, "hh/ppo", wandb.WandbSettings())
    wandb.start(fake, tmp_path, "hh/ppo", wandb.WandbSettings(mode="online", project="mine", tags=("a", "b")))
    wandb.start(fake, tmp_path / "other", "hh/ppo", wandb.WandbSettings())
    first, second, other = (kwargs for _, _, kwargs in fake.calls)

    assert first == {
        "project": "kedge",
        "entity": None,
        "group": None,
        "tags": [],
        "mode": "offline",
        "name": "hh/ppo",
        "id": (tmp_path / "trackers" / "wandb.id").read_text().strip(),
        "resume": None,
        "dir": str(tmp_path / "trackers"),
    }
    assert (second["id"], second["resume"], second["project"]) == (first["id"], "allow", "mine")
    assert second["tags"] == ["a", "b"]
    assert len(first["id"]) == 12
    assert other["id"] != first["id"]


def mlflow_tracker(fake: FakeMlflowClient) -> mlflow.MlflowTracker:
    return mlflow.MlflowTracker(fake, "r1", metric=lambda key, value, _time_ms, step: (key, value, step))


def test_mlflow_gets_one_batch_a_step_and_events_as_tags() -> None:
    fake = FakeMlflowClient()
    tracker: Tracker = mlflow_tracker(fake)
    tracker.log({"reward/mean": 0.5, "kl/mean": 2}, step=3)
    tracker.event(WARNING)
    tracker.close()

    assert fake.calls == [
        ("log_batch", "r1", [("reward/mean", 0.5, 3), ("kl/mean", 2.0, 3)]),
        ("set_tag", "r1", "event.kl.high", "warning at step 3: KL is 7.1 nats"),
        ("set_terminated", "r1", "FINISHED"),
    ]


def test_mlflow_ends_as_failed_after_a_fatal_event() -> None:
    fake = FakeMlflowClient()
    tracker = mlflow_tracker(fake)
    tracker.event(WARNING | {"level": "fatal", "message": "x" * 9000})
    tracker.event(WARNING)
    tracker.close()

    assert len(fake.calls[0][3]) == 5000  # the longest tag that MLflow takes
    assert fake.calls[-1] == ("set_terminated", "r1", "FAILED")


def test_mlflow_resumes_by_id(tmp_path: Path) -> None:
    fake = FakeMlflowClient()
    assert mlflow.start(fake, tmp_path, "hh/ppo", mlflow.MlflowSettings()) == "r1"
    assert mlflow.start(fake, tmp_path, "hh/ppo", mlflow.MlflowSettings()) == "r1"
    known = FakeMlflowClient(kedge="e7")
    mlflow.start(known, tmp_path / "other", "hh/sft", mlflow.MlflowSettings())

    assert fake.calls == [
        ("create_experiment", "kedge"),
        ("create_run", "new-experiment", "hh/ppo"),
        ("update_run", "r1", "RUNNING"),
    ]
    assert known.calls == [("create_run", "e7", "hh/sft")]


def test_mlflow_writes_into_the_run_folder_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = mlflow.MlflowSettings(tracking_uri="http://server:5000")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert mlflow.tracking_uri(tmp_path, mlflow.MlflowSettings()) == f"sqlite:///{tmp_path}/trackers/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    assert mlflow.tracking_uri(tmp_path, mlflow.MlflowSettings()) == "http://elsewhere"
    assert mlflow.tracking_uri(tmp_path, named) == "http://server:5000"


def test_trackers_come_through_the_plugin_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tensorboard="kedge.monitor.trackers.tensorboard:make")
    own = RecordingTracker()
    tracker = open_trackers(own, {"tensorboard": {}}, run_folder=tmp_path, name="hh/ppo")
    tracker.log({"loss": 0.5}, step=2)
    tracker.close()

    assert scalars(tmp_path) == {"loss": [(2, 0.5)]}
    assert own.logged == [(2, {"loss": 0.5})]
    with pytest.raises(PluginError, match=r"No tracker named 'tensorbord'\. Did you mean 'tensorboard'\?"):
        open_trackers(own, {"tensorbord": {}}, run_folder=tmp_path, name="hh")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, **{name: f"kedge.monitor.trackers.{name}:make"})
    monkeypatch.setattr(sys, "path", [])  # so that the test holds where the package is installed, too
    own = RecordingTracker()
    with pytest.raises(PluginError, match=rf"tracker '{name}' needs '{name}': pip install 'kedge\[{name}\]'") as caught:
        open_trackers(own, {name: {}}, run_folder=tmp_path, name="hh")
    assert caught.value.exit_code == 2
    assert own.events == []


def test_a_server_that_cannot_be_reached_at_the_start_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> Tracker:
        raise ConnectionError("no route")

    monkeypatch.setattr(plugins, "find", lambda kind, name: unreachable)
    own = RecordingTracker()
    tracker = open_trackers(own, {"remote": {}}, run_folder=tmp_path, name="hh")
    tracker.log({"loss": 0.5}, step=1)

    assert [event["evidence"] for event in own.events] == [{"tracker": "remote", "error": "ConnectionError: no route"}]
    assert own.logged == [(1, {"loss": 0.5})]


@pytest.mark.parametrize("make", [tensorboard.make, wandb.make, mlflow.make])
def test_wrong_settings_are_all_named_at_once(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"1 problem\(s\)\n  nonsense: not a setting here"):
        make(tmp_path, "hh", {"nonsense": 1})
    with pytest.raises(
        ConfigError,
        match=r"tracker 'wandb': 2 problem\(s\)\n  mode: Input should be 'offline' or 'online', found 'on'\n"
        r"  projct: not a setting here \(did you mean 'project'\?\)",
    ):
        wandb.make(tmp_path, "hh", {"projct": "x", "mode": "on"})
    assert not list(tmp_path.iterdir())
