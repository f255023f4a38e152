"""A run is a folder: manifest, journals, checkpoints and a lock, wired together; its journals are also a tracker.

    run.json  metrics.jsonl  events.jsonl  samples.jsonl  checkpoints/step-000120/  model/  report.html

The folder of a whole pipeline is a run as well (kind "pipeline"), with one such folder a stage inside it. Files are
created when they are first written. Left out: what `model/` and `report.html` hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from kedge.core.errors import RunError
from kedge.core.files import clear_partial_files, hash_json, run_errors
from kedge.core.findings import Level
from kedge.core.protocols import Metrics
from kedge.core.world import ALONE, World, by_first, once
from kedge.runs.checkpoints import Checkpoint, Checkpoints, CheckpointSettings, Share
from kedge.runs.journal import Alteration, Journal, dump_exact, encode_exact, load_exact, now
from kedge.runs.lock import Lock, acquire, held_by
from kedge.runs.manifest import MANIFEST_NAME, Artefact, Manifest, Status, read_manifest, write_manifest

_RESERVED = ("step", "at")
HISTORY: Final = frozenset(
    {
        "checkpoint.damaged",
        "process.lost",
        "run.cleared",
        "run.failed",
        "run.interrupted",
        "run.resumed",
        "run.stopped",
        "run.waiting",
        "settings.changed",
        "threads.changed",
        "versions.changed",
    }
)
"""Events about how a run went on, not about what it computed: going back to a checkpoint does not undo them."""


class Run:
    """One run. `create` and `open` make it; a writer holds the lock until `close` (or the end of a `with`)."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        lock: Lock | None,
        keep: CheckpointSettings,
        world: World = ALONE,
    ) -> None:
        self.folder = folder
        self.world = world
        self.manifest = manifest
        self.metrics = Journal(folder / "metrics.jsonl")
        self.events = Journal(folder / "events.jsonl")
        self.samples = Journal(folder / "samples.jsonl")
        self.checkpoints = Checkpoints(folder / "checkpoints", keep, world)
        self._lock = lock
        self._last_at = 0.0
        self._first_own_event = self.events.num_lines() if lock else 0
        """The place of the first event that this process writes."""
        self._told_again: list[dict[str, Any]] = []
        """Events of earlier processes that this one had to report too: they stay, wherever it goes on from."""

    @classmethod
    def create(cls, folder: Path, *, manifest: Manifest, keep: CheckpointSettings | None = None) -> Self:
        """Begin a run in a folder that is new or empty; never over another one."""
        with run_errors("create", folder):
            folder.mkdir(parents=True, exist_ok=True)
            _refuse_if_used(folder)
            lock = acquire(folder)
        try:
            _refuse_if_used(folder)  # again: another process may have begun here before the lock was ours
            write_manifest(folder, manifest)
        except BaseException:
            lock.release()
            raise
        return cls(folder, manifest, lock, keep or CheckpointSettings())

    @classmethod
    def shared(cls, world: World, open_run: Callable[[], Run]) -> Run:
        """The run that process 0 opens, on all processes: 0 reads and writes its files for the others, who wait."""
        if world.size == 1:
            return open_run()
        opened: list[Run] = []

        def open_first() -> tuple[Path, Manifest]:
            opened.append(open_run())
            return opened[0].folder, opened[0].manifest

        folder, manifest = once(world, open_first)
        if not opened:
            return cls(folder, manifest, None, CheckpointSettings(), world)
        opened[0].world = opened[0].checkpoints.world = world
        return opened[0]

    @classmethod
    def open(cls, folder: Path, *, for_writing: bool, keep: CheckpointSettings | None = None) -> Self:
        """An existing run. Reading changes nothing; a writer first clears up what a kill left half done."""
        manifest = read_manifest(folder)
        lock = acquire(folder) if for_writing else None
        run = cls(folder, manifest, lock, keep or CheckpointSettings())
        if for_writing:
            try:
                run.manifest = read_manifest(folder)  # the writer before us may have changed it while we waited
                run._clear_up()
            except BaseException:
                run.close()
                raise
        return run

    @by_first
    def log(self, metrics: Metrics, step: int) -> None:
        """Append one line of metrics. Values may be any real numbers, those of numpy and torch too."""
        self._require_lock()
        _refuse_reserved(metrics)
        values = {name: _number(name, value) for name, value in metrics.items()}
        self.metrics.append({"step": step, "at": self._clock(), **values})

    @by_first
    def event(self, level: Level, code: str, message: str, step: int | None = None, **evidence: Any) -> None:
        """Write an event. One without a step, as a stage reports of its data when it starts, is not told again by a
        process that goes on with the run."""
        self._require_lock()
        fields = {"step": step, "level": level, "code": code, "message": message, "evidence": evidence}
        if step is None and code not in HISTORY and self._has_told(fields):
            return
        self.events.append({"step": step, "at": self._clock(), **fields})

    @by_first
    def sample(self, record: Mapping[str, Any], step: int) -> None:
        self._require_lock()
        _refuse_reserved(record)
        self.samples.append({"step": step, "at": self._clock(), **record})

    @by_first
    def read_metrics(self) -> list[dict[str, Any]]:
        return self.metrics.read().records

    @by_first
    def read_events(self) -> list[dict[str, Any]]:
        return self.events.read().records

    @by_first
    def read_samples(self) -> list[dict[str, Any]]:
        return self.samples.read().records

    def alterations(self) -> list[Alteration]:
        """The journals' lines that are not as they were written, the first one of each; none where all is well."""
        return [alteration for journal in self._journals() if (alteration := journal.alteration())]

    def save_checkpoint(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        share: Share | None = None,
        metrics: Metrics | None = None,
        pin: str | None = None,
    ) -> Checkpoint:
        """`Checkpoints.save`, after syncing the journals: a power cut never loses a step that a checkpoint includes.

        Process 0 alone calls `write`; every process calls its `share`, where there is something to share.
        """
        if share is not None:
            self.checkpoints.begin(step, share)
        return self._save_checkpoint(step, write, is_begun=share is not None, metrics=metrics, pin=pin)

    @by_first
    def _save_checkpoint(
        self, step: int, write: Callable[[Path], None], *, is_begun: bool, metrics: Metrics | None, pin: str | None
    ) -> Checkpoint:
        self._require_lock()
        for journal in self._journals():
            journal.sync()
        num_lines = {journal.path.name: journal.num_lines() for journal in self._journals()}
        return self.checkpoints.save(step, write, is_begun=is_begun, metrics=metrics, pin=pin, num_lines=num_lines)

    @by_first
    def resume_at(self, step: int | None) -> None:
        """Go on as if `step` were the last one done (None: none was). Later records and checkpoints are dropped.

        Later is what was written after the checkpoint of that step was, whatever its step: it will be written again.
        What this process reported before it came here stays where the checkpoint does not have it already.
        """
        self._require_lock()
        is_kept = self._kept_at(step)
        dropped_steps = self.checkpoints.discard_after(step)
        dropped = {journal.path.name: journal.filter(is_kept[journal.path.name]) for journal in self._journals()}
        self._first_own_event = min(self._first_own_event, self._num_events_at(step))
        self._update(status="running", finished=None)
        where = "the beginning" if step is None else f"step {step}"
        message = f"The run goes on from {where}; later records are dropped and will be written again."
        self.event("info", "run.resumed", message, resumed_at=step, dropped=dropped, dropped_checkpoints=dropped_steps)

    @by_first
    def has_later_records(self, step: int | None) -> bool:
        """Whether `resume_at` would drop records."""
        is_kept = self._kept_at(step)
        return any(
            not is_kept[journal.path.name](place, record)
            for journal in self._journals()
            for place, record in enumerate(journal.read().records)
        )

    @by_first
    def reopen(self, **changes: Any) -> None:
        """Set a run that had ended to running again, until it ends again; `changes` are of its manifest."""
        self._require_lock()
        if "settings" in changes:
            changes["settings"] = load_exact(dump_exact(changes["settings"]))
            changes["recipe_hash"] = hash_json(encode_exact(changes["settings"]))
        self._update(status="running", finished=None, **changes)

    @by_first
    def amend(self, **changes: Any) -> None:
        """Write into the manifest what is known only after the run has ended."""
        self._require_lock()
        self._update(**changes)

    @by_first
    def finish(self, status: Status, *, outputs: Iterable[Artefact] = ()) -> None:
        """Write how the run ended. The lock stays until `close`."""
        self._require_lock()
        for journal in self._journals():
            journal.sync()
        self._update(status=status, finished=now(), outputs=tuple(outputs))

    @property
    def status(self) -> Status:
        return self.manifest.status if self._lock is not None else status_of(self.folder)

    def close(self) -> None:
        for journal in self._journals():
            journal.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_told(self, fields: Mapping[str, Any]) -> bool:
        """Whether an earlier process wrote the same event, which is then this one's as well."""
        event: dict[str, Any] = load_exact(dump_exact(fields))
        earlier = self.events.read().records[: self._first_own_event]
        if event not in [_without_time(record) for record in earlier]:
            return False
        self._told_again.append(event)
        return True

    def _kept_at(self, step: int | None) -> dict[str, Callable[[int, Mapping[str, Any]], bool]]:
        """By journal, which of its records stay when the run goes on from `step`."""
        num_lines = self._num_lines_at(step)
        if num_lines is None:
            by_step = _up_to(step)
            return {journal.path.name: lambda _, record: by_step(record) for journal in self._journals()}
        events = num_lines[self.events.path.name]
        reported = [_without_time(event) for event in self.events.read().records[:events]]

        def keeps_event(place: int, event: Mapping[str, Any]) -> bool:
            if place < events or event["code"] in HISTORY or _without_time(event) in self._told_again:
                return True
            is_own = place >= self._first_own_event
            return is_own and _up_to(step)(event) and _without_time(event) not in reported

        def keeps_line(name: str) -> Callable[[int, Mapping[str, Any]], bool]:
            return lambda place, _: place < num_lines[name]

        return {journal.path.name: keeps_line(journal.path.name) for journal in (self.metrics, self.samples)} | {
            self.events.path.name: keeps_event
        }

    def _num_lines_at(self, step: int | None) -> Mapping[str, int] | None:
        """The lines that each journal had at the checkpoint of `step`, none at the beginning; None where no checkpoint
        tells."""
        names = [journal.path.name for journal in self._journals()]
        if step is None:
            return dict.fromkeys(names, 0)
        if step not in self.checkpoints.steps():
            return None
        num_lines = self.checkpoints.read(step, check_hashes=False).num_lines
        return num_lines if all(name in num_lines for name in names) else None

    def _num_events_at(self, step: int | None) -> int:
        num_lines = self._num_lines_at(step)
        return self.events.num_lines() if num_lines is None else num_lines[self.events.path.name]

    def _journals(self) -> tuple[Journal, Journal, Journal]:
        return self.metrics, self.events, self.samples

    def _update(self, **changes: Any) -> None:
        changed = replace(self.manifest, **changes)
        write_manifest(self.folder, changed)
        self.manifest = changed

    def _clock(self) -> float:
        """Seconds since 1970, and never less than before: a clock that is set back stands still here."""
        self._last_at = max(self._last_at, round(time.time(), 3))
        return self._last_at

    def _require_lock(self) -> None:
        if self._lock is None:
            raise RunError(f"{self.folder} is open for reading only: use Run.open(folder, for_writing=True).")

    def _clear_up(self) -> None:
        bytes_cut = {journal.path.name: size for journal in self._journals() if (size := journal.repair())}
        leftovers = clear_partial_files(self.folder) + self.checkpoints.clear_leftovers()
        for child in sorted(self.folder.iterdir()):
            if child.is_dir() and not (child / MANIFEST_NAME).exists() and child != self.checkpoints.folder:
                leftovers += [f"{child.name}/{name}" for name in clear_partial_files(child)]
        if bytes_cut or leftovers:
            message = "The last writer was killed at work; what it left half written is cleared."
            self.event("info", "run.cleared", message, bytes_cut=bytes_cut, leftovers=leftovers)


def status_of(folder: Path) -> Status:
    """The status of a run: one that is running by its manifest, but that no process writes to, was interrupted."""
    status = read_manifest(folder).status
    if status != "running" or held_by(folder):
        return status
    # The writer may have finished after the manifest was read and before the lock was: only reading it again can tell.
    status = read_manifest(folder).status
    return "interrupted" if status == "running" else status


def runs_in(folder: Path) -> list[Path]:
    """The runs directly inside `folder` (the stages of a pipeline, or the pipelines below runs/), oldest first."""
    runs = [child for child in folder.iterdir() if (child / MANIFEST_NAME).is_file()] if folder.is_dir() else []
    return sorted(runs, key=lambda child: (read_manifest(child).created, child.name))


def _up_to(step: int | None) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a record is of no later step than `step`; one without a step is of none."""
    return lambda record: (at := record.get("step")) is None or (step is not None and at <= step)


def _without_time(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "at"}


def _refuse_if_used(folder: Path) -> None:
    if (folder / MANIFEST_NAME).exists():
        raise RunError(f"{folder} already holds a run. Resume it (--resume), or give the new run another name.")
    # Hidden files do not count: a writer that was killed just here leaves its lock and a part of the manifest.
    if visible := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
        raise RunError(f"{folder} is not empty and not a run (it holds {', '.join(visible[:5])}). Choose a new folder.")


def _refuse_reserved(names: Iterable[str]) -> None:
    if taken := [name for name in names if name in _RESERVED]:
        raise RunError(f"The name '{taken[0]}' is taken: every line has a field called so. Choose another one.")


def _number(name: str, value: Any) -> float:
    if type(value) in (int, float):
        return value
    try:
        if isinstance(value, str):
            raise TypeError("a text, even one that reads as a number")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last one for a tensor of several
        raise RunError(f"Metric '{name}' is not a number: found {value!r:.100} ({type(value).__name__}).") from error


_FIELDS = ("level", "code", "message", "step", "evidence")


class RunTracker:
    """`kedge.core.protocols.Tracker` over `metrics.jsonl` and `events.jsonl`. Closing it leaves the run open."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def log(self, metrics: Metrics, *, step: int) -> None:
        self._run.log(metrics, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """An event as `Run.event` takes it, or a finding as a dict, whose other fields become evidence."""
        others = {name: value for name, value in event.items() if name not in _FIELDS and value}
        evidence = {**others, **event.get("evidence", {})}
        self._run.event(event["level"], event["code"], event["message"], event.get("step"), **evidence)

    def close(self) -> None:
        pass
