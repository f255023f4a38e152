"""An append-only file of JSON lines that survives a kill at any moment: one write call a line, nothing buffered.

A last line without its newline was cut off: readers leave it out and say so, writers remove it before they append.
A bad line anywhere else is an error. Left out: power cuts lose what was not yet synced (see `Journal.sync`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import RunError
from kedge.core.files import atomic_open, run_errors
from kedge.runs import exact_json

_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContents:
    records: list[dict[str, Any]]
    is_cut_off: bool
    """The file ends in a line without its newline, which is not among the records."""


def now() -> str:
    """The time as records hold it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Journal:
    """The lines of one file. It is created by the first `append`; reading changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        line = self._encode(record)
        with run_errors("append to", self.path):
            handle = self._opened()
            end = os.fstat(handle).st_size
            try:
                while line:  # one pass, unless the disk is nearly full
                    line = line[os.write(handle, line) :]
            except OSError:
                with suppress(OSError):  # if even this fails, the next writer removes the half line
                    os.ftruncate(handle, end)
                raise

    def read(self) -> JournalContents:
        _, records, rest = self._scan()
        return JournalContents(records=records, is_cut_off=bool(rest))

    def rewind(self, step: int | None) -> int:
        """Drop the records of steps after `step` (for None, all that have a step); returns how many.

        Records without a step stay. The file is replaced as a whole: a kill leaves the old one or the new one.
        """
        lines, records, rest = self._scan()
        remaining = [line for line, record in zip(lines, records, strict=True) if not _is_after(record, step)]
        if len(remaining) < len(lines) or rest:
            self.close()
            with run_errors("rewind", self.path), atomic_open(self.path) as file:
                file.writelines(line + b"\n" for line in remaining)
        return len(lines) - len(remaining)

    def repair(self) -> int:
        """Remove a cut-off last line; returns its length in bytes."""
        if not self.path.exists():
            return 0
        with run_errors("repair", self.path):
            handle = os.open(self.path, os.O_RDWR)
            try:
                size = os.fstat(handle).st_size
                end = _end_of_last_line(handle, size)
                if end < size:
                    os.ftruncate(handle, end)
            finally:
                os.close(handle)
        return size - end

    def sync(self) -> None:
        """Have everything written so far survive a power cut."""
        if self._handle is not None:
            with run_errors("sync", self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            self.repair()
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return self._handle

    def _encode(self, record: Mapping[str, Any]) -> bytes:
        try:
            text = exact_json.dumps(record)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"Cannot write a record to {self.path}: {error}. The record: {dict(record)!r:.200}"
            ) from error
        # A lone surrogate has no UTF-8; what backslashreplace makes of it is its escape in JSON.
        return f"{text}\n".encode(errors="backslashreplace")

    def _scan(self) -> tuple[list[bytes], list[dict[str, Any]], bytes]:
        try:
            *lines, rest = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], [], b""
        except OSError as error:
            raise RunError(f"Cannot read {self.path}: {error.strerror}.") from error
        return lines, [self._parse(line, number) for number, line in enumerate(lines, start=1)], rest

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = exact_json.loads(line)
        except ValueError as error:
            raise self._bad_line(line, number, str(error)) from error
        if not isinstance(record, dict):
            raise self._bad_line(line, number, f"a {type(record).__name__}, not an object")
        return cast(dict[str, Any], record)

    def _bad_line(self, line: bytes, number: int, reason: str) -> RunError:
        return RunError(
            f"{self.path}:{number}: this line is not a JSON object ({reason}). Found: {line[:80]!r}. "
            "Only a last line can be cut off by a kill, so the file was changed or the disk is at fault: "
            "remove the line, or restore the file."
        )


def _is_after(record: Mapping[str, Any], step: int | None) -> bool:
    at = record.get("step")
    return at is not None and (step is None or at > step)


def _end_of_last_line(handle: int, size: int) -> int:
    """Where the last complete line ends, reading backwards in blocks."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
