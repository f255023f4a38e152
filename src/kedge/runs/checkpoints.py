"""Checkpoints that are whole or absent, and of which the last good one always survives.

A checkpoint is written under a hidden name, listed file by file with sizes and hashes, flushed to disk and then
renamed; before one is deleted it is renamed to a hidden name. Whatever a kill leaves behind is hidden, therefore, and
is cleared by the next writer. What is inside a checkpoint is up to the caller.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from kedge.core.errors import CheckpointError, KedgeError, RunError
from kedge.core.files import (
    as_os_error,
    clear_partial_files,
    explain,
    free_bytes,
    fsync_folder,
    hash_files,
    is_disk_full,
    readable_bytes,
    run_errors,
    write_json,
)
from kedge.core.settings import Section
from kedge.core.world import ALONE, World, acting_alone, by_first, once, together
from kedge.runs.journal import encode_exact, load_exact, now

SEEN_WITHIN_S = 60.0
"""How long process 0 waits until it sees the files of the others."""
Share = Callable[[Path], Sequence[str]]
"""Writes what a process has of a checkpoint, and gives the names of its files."""
_PINS_NAME = "pins.json"
_NAME = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"\.(step-\d{6,})\.(partial|removed|replaced)-\d+")


class CheckpointSettings(Section):
    """When checkpoints are written and how many are kept."""

    every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest are kept. With two, a run survives a disk that damages one."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps divisible by this are kept for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    folder: Path
    created: str
    metrics: Mapping[str, float]
    num_lines: Mapping[str, int]
    """How many lines each journal had when it was saved; empty where an older version saved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest checkpoint that verifies, and the reasons why newer ones did not."""

    checkpoint: Checkpoint
    skipped: tuple[str, ...]


class Checkpoints:
    """The folder `checkpoints/` of one run. Nothing is touched before the first `save`."""

    def __init__(self, folder: Path, settings: CheckpointSettings, world: World = ALONE) -> None:
        self.folder = folder
        self.world = world
        self._settings = settings

    @by_first
    def steps(self) -> list[int]:
        """Steps of the checkpoints under their final name, damaged or not, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def begin(self, step: int, share: Share) -> None:
        """Have every process write its share of the checkpoint of `step`, which `save` then completes.

        Where one of them fails, all do, and nothing is left of it.
        """
        partial = self._make_partial(step)

        def write_own() -> dict[str, int]:
            try:
                return {name: (partial / name).stat().st_size for name in share(partial)}
            except Exception as error:
                with acting_alone():
                    raise self._refusal(step, error, size_of(partial)) or error from error

        try:
            shares = together(self.world, write_own)
            once(self.world, lambda: wait_for_files(partial, shares))
        except KedgeError:
            once(self.world, lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    @by_first
    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        is_begun: bool = False,
        metrics: Mapping[str, float] | None = None,
        pin: str | None = None,
        num_lines: Mapping[str, int] | None = None,
    ) -> Checkpoint:
        """Have `write` fill a folder, put it in place, then delete the checkpoints that need not be kept.

        A `pin` ("best") keeps this checkpoint until another one takes the same pin. One that `is_begun` has the shares
        of all processes already.
        """
        partial = self._hidden(step, "partial")
        saved = Checkpoint(
            step=step,
            folder=self.path(step),
            created=now(),
            metrics=dict(metrics or {}),
            num_lines=dict(num_lines or {}),
        )
        try:
            if not is_begun:
                self._make_partial(step)
            write(partial)
            facts = {"step": step, "created": saved.created, "metrics": saved.metrics, "num_lines": saved.num_lines}
            seal(partial, facts)
            if pin is not None:
                self._write_pin(pin, step)
            self._put_in_place(partial, step)
        except BaseException as error:
            written = size_of(partial)
            shutil.rmtree(partial, ignore_errors=True)
            if (refusal := self._refusal(step, error, written)) is not None:
                raise refusal from error
            raise
        self._retire(just_saved=step)
        return saved

    @by_first
    def read(self, step: int, *, check_hashes: bool) -> Checkpoint:
        """The checkpoint of `step`, after checking that all its files are there (and have the right hashes)."""
        folder = self.path(step)
        facts = read_sealed(folder, check_hashes=check_hashes)
        if facts.get("step") != step:
            raise CheckpointError(f"{folder} belongs to step {facts.get('step')}: it was renamed")
        return Checkpoint(
            step=step,
            folder=folder,
            created=facts.get("created", ""),
            metrics=facts.get("metrics", {}),
            num_lines=facts.get("num_lines", {}),
        )

    @by_first
    def latest(self, *, check_hashes: bool = True) -> Latest | None:
        """The newest checkpoint that verifies; None where there is none at all."""
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                return Latest(checkpoint=self.read(step, check_hashes=check_hashes), skipped=tuple(skipped))
            except CheckpointError as error:
                skipped.append(str(error))
        if not skipped:
            return None
        listed = "\n".join(f"  {reason}" for reason in skipped)
        raise CheckpointError(
            f"{self.folder}: none of the {len(skipped)} checkpoint(s) can be used:\n{listed}\n"
            "Restore one from a copy, or remove them all to start from the beginning."
        )

    @by_first
    def pins(self) -> dict[str, int]:
        """The step that each pin is on."""
        existing = set(self.steps())
        pinned = {name: [step for step in steps if step in existing] for name, steps in self._pin_history().items()}
        return {name: steps[-1] for name, steps in pinned.items() if steps}

    @by_first
    def pin(self, step: int, name: str) -> None:
        """Keep the checkpoint of `step` until `name` is given to another one."""
        if step not in self.steps():
            raise CheckpointError(f"Cannot pin step {step} as '{name}': {self.folder} holds steps {self.steps()}.")
        with run_errors("write", self.folder / _PINS_NAME):
            self._write_pin(name, step)

    @by_first
    def discard_after(self, step: int | None) -> list[int]:
        """Remove the checkpoints of later steps (for None, all), which a run that resumes at `step` does again."""
        later_steps = [later for later in self.steps() if step is None or later > step]
        for later in reversed(later_steps):
            self._remove(later)
        history = self._pin_history()
        earlier = {name: [at for at in steps if step is not None and at <= step] for name, steps in history.items()}
        if earlier != history:
            with run_errors("write", self.folder / _PINS_NAME):
                write_json(self.folder / _PINS_NAME, earlier)
        return later_steps

    @by_first
    def clear_leftovers(self) -> list[str]:
        """Clear what a killed writer left half done; returns the names. Only the holder of the lock may call this."""
        leftovers = sorted(path for path in _children(self.folder) if _LEFTOVER.fullmatch(path.name))
        with run_errors("clear up", self.folder):
            for path in leftovers:
                match = _LEFTOVER.fullmatch(path.name)
                if match and match[2] == "replaced" and not (self.folder / match[1]).exists():
                    path.rename(self.folder / match[1])  # killed between two renames: the old one is still good
                else:
                    shutil.rmtree(path, ignore_errors=True)
        return clear_partial_files(self.folder) + [path.name for path in leftovers]

    @by_first
    def _make_partial(self, step: int) -> Path:
        partial = self._hidden(step, "partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        except OSError as error:
            raise self._refusal(step, error, 0) or error from error
        return partial

    def _refusal(self, step: int, error: BaseException, written: int) -> KedgeError | None:
        """The error in words where the system refused to write a checkpoint of which so many bytes were written."""
        if is_disk_full(error):
            return CheckpointError(self._full_message(step, written))
        refusal = None if isinstance(error, KedgeError) else as_os_error(error)
        if refusal is None:
            return None
        return RunError(f"Cannot write checkpoint {self.path(step)}: {explain(refusal, self._hidden(step, 'partial'))}")

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _hidden(self, step: int, state: str) -> Path:
        return self.folder / f".{self.path(step).name}.{state}-{os.getpid()}"

    def _put_in_place(self, partial: Path, step: int) -> None:
        target, replaced = self.path(step), self._hidden(step, "replaced")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        try:
            partial.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
        fsync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _retire(self, *, just_saved: int) -> None:
        """Damaged checkpoints do not count towards `keep`: they must not push out a good one."""
        whole = [step for step in self.steps() if self._is_whole(step)]
        every = self._settings.keep_every
        protected = {just_saved, *whole[-self._settings.keep :], *self.pins().values()}
        for step in self.steps():
            if step not in protected and not (every and step % every == 0):
                self._remove(step)

    def _is_whole(self, step: int) -> bool:
        try:
            self.read(step, check_hashes=False)
        except CheckpointError:
            return False
        return True

    def _remove(self, step: int) -> None:
        hidden = self._hidden(step, "removed")
        with run_errors("remove", self.path(step)):
            shutil.rmtree(hidden, ignore_errors=True)
            self.path(step).rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _pin_history(self) -> dict[str, list[int]]:
        """For each pin the step it was on and the one it moved to; the later one counts if it exists.

        A pin moves before the new checkpoint is in place, so a kill between the two leaves it where it was.
        """
        path = self.folder / _PINS_NAME
        try:
            pins = load_exact(path.read_bytes())
            return {name: [int(step) for step in steps] for name, steps in pins.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Remove it to unpin all checkpoints.") from error

    def _write_pin(self, name: str, step: int) -> None:
        previous = [at for pinned, at in self.pins().items() if pinned == name and at != step]
        write_json(self.folder / _PINS_NAME, self._pin_history() | {name: [*previous, step]})

    def _full_message(self, step: int, written: int) -> str:
        steps = self.steps()
        needed = f"at least {readable_bytes(written)}"
        if steps:
            needed = f"about {readable_bytes(max(written, size_of(self.path(steps[-1]))))}"
        safe = f"{self.path(steps[-1])} is untouched" if steps else "there is no earlier checkpoint"
        return (
            f"The disk is full: checkpoint {self.path(step)} needs {needed} and "
            f"{readable_bytes(free_bytes(self.folder))} are free. The half that was written is removed; {safe}. "
            "Free some space or lower checkpoints.keep, then resume the run."
        )


def wait_for_files(folder: Path, shares: Sequence[Mapping[str, int]], *, within_s: float = SEEN_WITHIN_S) -> None:
    """Until this process sees what the others have written: a disk of several machines may show it a little later."""
    expected = {folder / name: size for sizes in shares for name, size in sizes.items()}
    until = time.monotonic() + within_s
    while unseen := [path for path, size in expected.items() if not path.is_file() or path.stat().st_size != size]:
        if time.monotonic() > until:
            raise CheckpointError(
                f"{unseen[0]} was written by another process, and is not seen here after {within_s:g} s: all "
                "machines of a run need one disk"
            )
        time.sleep(0.1)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


SEAL_NAME = "checkpoint.json"


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the list, with `facts` beside it, and flush everything to disk."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "hash": hashed}
        for path, hashed in zip(paths, hash_files(paths), strict=True)
    }
    write_json(folder / SEAL_NAME, encode_exact({**facts, "files": files}))
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_folder(path)
        elif path.name != SEAL_NAME:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(folder)


def read_sealed(folder: Path, *, check_hashes: bool) -> dict[str, Any]:
    """The facts, after checking that every listed file has the right size (and hash). Other files are ignored."""
    seal_file = folder / SEAL_NAME
    try:
        facts = cast(dict[str, Any], load_exact(seal_file.read_bytes()))
        files = {folder / name: expected for name, expected in facts.pop("files").items()}
        for path, expected in files.items():
            _check_size(path, expected["size"])
        for path, hashed in zip(files, hash_files(list(files)), strict=True) if check_hashes else ():
            if hashed != files[path]["hash"]:
                raise CheckpointError(f"{path} has changed since it was written (its hash differs)")
    except FileNotFoundError as error:
        raise CheckpointError(f"{seal_file} is missing: the folder was cut off, or copied in part") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{seal_file} cannot be used: {error}") from error
    return facts


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if (size := path.stat().st_size) != expected:
        raise CheckpointError(f"{path} has {size} bytes instead of {expected}")
