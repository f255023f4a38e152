"""Where metrics and events go besides the run's own journals: one module a tracker, found by entry point.

A tracker is made by `make(run_folder, name, settings)`. The journals themselves need no plugin: they are always
there, and a run without trackers loses nothing. What a tracker keeps on disk lies below `RUN/trackers/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from kedge.core import plugins
from kedge.core.errors import ConfigError, KedgeError, PluginError
from kedge.core.files import write_text
from kedge.core.protocols import Metrics, Tracker
from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean

SectionT = TypeVar("SectionT", bound=Section)


class Make(Protocol):
    """What an entry point of the group `kedge.trackers` names."""

    def __call__(self, run_folder: Path, name: str, settings: Mapping[str, Any]) -> Tracker: ...


class NullTracker:
    """For whoever needs a tracker and wants nothing kept."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        pass

    def event(self, event: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Fanout:
    """The run's own tracker, and others beside it that can never harm the run.

    An error of `own` is an error of the run. Another tracker that fails is reported once, as an event, and left out
    from then on.
    """

    def __init__(self, own: Tracker, others: Mapping[str, Tracker]) -> None:
        self._own = own
        self._others = dict(others)

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._own.log(metrics, step=step)
        for name, tracker in list(self._others.items()):
            try:
                tracker.log(metrics, step=step)
            except Exception as error:
                self._drop(name, error, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        self._own.event(event)
        for name, tracker in list(self._others.items()):
            try:
                tracker.event(event)
            except Exception as error:
                self._drop(name, error, step=event.get("step"))

    def close(self) -> None:
        for name, tracker in list(self._others.items()):
            try:
                tracker.close()
            except Exception as error:
                self._drop(name, error, step=None)
        self._others.clear()
        self._own.close()

    def _drop(self, name: str, error: Exception, *, step: int | None) -> None:
        del self._others[name]
        self._own.event(failure(name, error, step=step))


def open_trackers(own: Tracker, wanted: Mapping[str, Mapping[str, Any]], *, run_folder: Path, name: str) -> Fanout:
    """`own` with the trackers that a recipe asks for, by name with their settings.

    An unknown name, a missing package or a wrong setting is an error now; a server that cannot be reached is an event.
    """
    others: dict[str, Tracker] = {}
    for kind, settings in wanted.items():
        make: Make = plugins.find("trackers", kind)
        try:
            others[kind] = make(run_folder, name, settings)
        except KedgeError:
            raise
        except ModuleNotFoundError as error:
            missing = (error.name or "?").partition(".")[0]
            raise PluginError(f"tracker '{kind}' needs '{missing}': pip install 'kedge[{kind}]'") from error
        except Exception as error:
            own.event(failure(kind, error, step=None))
    return Fanout(own, others)


def failure(name: str, error: Exception, *, step: int | None) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {error}"
    return {
        "level": "warning",
        "code": "tracker.failed",
        "message": f"Tracker '{name}' failed and is left out from here on ({reason}). metrics.jsonl has everything.",
        "step": step,
        "evidence": {"tracker": name, "error": reason},
    }


def read_settings(section: type[SectionT], settings: Mapping[str, Any], *, tracker: str) -> SectionT:
    """The settings of one tracker, all problems at once."""
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
    """The id under which a remote tracker knows this run, so that a resumed run goes on under the same one."""
    path = tracker_folder(run_folder) / f"{tracker}.id"
    return path.read_text().strip() if path.exists() else None


def save_id(run_folder: Path, tracker: str, value: str) -> None:
    write_text(tracker_folder(run_folder) / f"{tracker}.id", value + "\n")
