"""Experiment trackers beside the run's own journals: one module a tracker, looked up by entry point.

A tracker is made by `make(run_folder, name, settings)`. The journals themselves need no plugin: they are always
there, and a run without trackers loses nothing. What a tracker keeps on disk lies below `RUN/trackers/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from kedge.core import plugins
from kedge.core.errors import ConfigError, KedgeError, PluginError
from kedge.core.files import write_text
from kedge.core.protocols import Metrics, Tracker
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean
from kedge.monitor.trackers.forwarding import ForwardingTracker

SectionT = TypeVar("SectionT", bound=Section)


class MakeTracker(Protocol):
    """The type of an entry point in the group `kedge.trackers`."""

    def __call__(self, run_folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker: ...


class Fanout(ForwardingTracker):
    """The run's own tracker, and others beside it whose failures never stop the run.

    An error of `own` is an error of the run. Another tracker that fails is reported once, as an event, and left out
    from then on.
    """

    def __init__(self, own: Tracker, others: Mapping[str, Tracker]) -> None:
        super().__init__(own)
        self._others = dict(others)

    def log(self, metrics: Metrics, *, step: int) -> None:
        super().log(metrics, step=step)
        self._call_others(lambda tracker: tracker.log(metrics, step=step), step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        super().event(event)
        self._call_others(lambda tracker: tracker.event(event), step=event.get("step"))

    def close(self) -> None:
        self._call_others(lambda tracker: tracker.close(), step=None)
        self._others.clear()
        super().close()

    def _call_others(self, call: Callable[[Tracker], None], *, step: int | None) -> None:
        for name, tracker in list(self._others.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._others[name]
                super().event(failure_event(name, error, step=step))


def open_trackers(
    own: Tracker, settings_by_kind: Mapping[str, Mapping[str, Any]], *, run_folder: Path, name: str
) -> Tracker:
    """`own` with the trackers of a recipe beside it; `own` itself where there are none.

    An unknown name, a missing package or a wrong setting is an error now; a server that cannot be reached is an event.
    """
    others: dict[str, Tracker] = {}
    for kind, settings in settings_by_kind.items():
        make: MakeTracker = plugins.find("trackers", kind)
        try:
            others[kind] = make(run_folder, name, settings)
        except KedgeError:
            raise
        except ModuleNotFoundError as error:
            package = (error.name or "?").partition(".")[0]
            raise PluginError(f"tracker '{kind}' needs '{package}': pip install 'kedge[{kind}]'") from error
        except Exception as error:
            own.event(failure_event(kind, error, step=None))
    return Fanout(own, others) if others else own


def failure_event(name: str, error: Exception, *, step: int | None) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {error}"
    return {
        "level": "warning",
        "code": "tracker.failed",
        "message": f"Tracker '{name}' failed and is left out from here on ({reason}). metrics.jsonl has everything.",
        "step": step,
        "evidence": {"tracker": name, "error": reason},
    }


def read_settings(section: type[SectionT], settings: Mapping[str, Any], *, tracker: str) -> SectionT:
    """Validate the settings of one tracker; the error lists all problems at once."""
    try:
        return section.model_validate(dict(settings))
    except ValidationError as error:
        lines = [_problem(dict(item), section) for item in error.errors()]
        raise ConfigError(f"tracker '{tracker}': {len(lines)} problem(s)\n" + "\n".join(lines)) from error


def _problem(item: Mapping[str, Any], section: type[Section]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"  {place}: not a setting here{did_you_mean(place, section.model_fields)}"
    return f"  {place}: {item['msg']}, found {item['input']!r}"


def tracker_folder(run_folder: Path) -> Path:
    folder = run_folder / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def saved_id(run_folder: Path, tracker: str) -> str | None:
    """The id of this run at a remote tracker, under which a resumed run goes on."""
    path = tracker_folder(run_folder) / f"{tracker}.id"
    return path.read_text().strip() if path.exists() else None


def save_id(run_folder: Path, tracker: str, value: str) -> None:
    write_text(tracker_folder(run_folder) / f"{tracker}.id", value + "\n")
