"""An append-only file of JSON lines that survives a kill at any moment: one write call a line, nothing buffered.

A last line without its newline was cut off: readers leave it out and say so, writers remove it before they append.
A bad line anywhere else is an error, and one that was changed or removed is noticed (`Chain`). The JSON
loses nothing: floats keep every bit; NaN and the infinities, which JSON lacks, are written as "NaN", "Infinity" and
"-Infinity" and come back as floats, and a string of the same text (a model may well answer "NaN") is escaped with a
backslash in front. Tuples come back as lists, a NaN loses its sign and payload. Left out: power cuts lose what was not
yet synced (see `Journal.sync`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, cast

from kedge.core.errors import RunError
from kedge.core.files import atomic_open, run_errors
from kedge.runs.lines import Block, JournalReader

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
        self._chain = Chain(path)
        self._handle: int | None = None
        self._num_lines = 0
        self._writing = threading.RLock()
        """A line and its hash are written together, also where a thread reports of what it does."""

    def append(self, record: Mapping[str, Any]) -> None:
        line = self._encode(record)
        with self._writing, run_errors("append to", self.path):
            handle = self._opened()
            end = os.fstat(handle).st_size
            try:
                rest = line
                while rest:  # one pass, unless the disk is nearly full
                    rest = rest[os.write(handle, rest) :]
                self._chain.extend([line[:-1]])
            except OSError:
                with suppress(OSError):  # if even this fails, the next writer removes the half line
                    os.ftruncate(handle, end)
                raise
            self._num_lines += 1

    def read(self) -> JournalContents:
        _, records, is_cut_off = self._scan()
        return JournalContents(records=records, is_cut_off=is_cut_off)

    def num_lines(self) -> int:
        """How many whole lines there are."""
        return self._num_lines if self._handle is not None else len(self._lines()[0])

    @property
    def has_chain(self) -> bool:
        return self._chain.path.exists()

    def alteration(self) -> Alteration | None:
        """The first line that is not as it was written; None where all are, or no chain was kept of them."""
        hashes = self._chain.read()  # first: lines that are written meanwhile are behind its end
        return None if hashes is None else first_alteration(self.path, JournalReader(self.path).blocks(), hashes)

    def filter(self, is_kept: Callable[[int, Mapping[str, Any]], bool]) -> int:
        """Drop the records that a function of their place (from 0) and themselves does not keep; returns how many.

        The file is replaced as a whole: a kill leaves the old one or the new one.
        """
        with self._writing:
            lines, records, is_cut_off = self._scan()
            is_kept_at = [is_kept(place, record) for place, record in enumerate(records)]
            if all(is_kept_at) and not is_cut_off:
                return 0
            self.close()
            with run_errors("rewind", self.path):
                self._chain.cut(is_kept_at.index(False) if False in is_kept_at else len(lines))
                with atomic_open(self.path) as file:
                    file.writelines(line + b"\n" for line, keeps in zip(lines, is_kept_at, strict=True) if keeps)
            return is_kept_at.count(False)

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
                self._chain.sync()

    def close(self) -> None:
        self._chain.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            self.repair()
            lines, _ = self._lines()
            self._chain.open(lines)
            self._num_lines = len(lines)
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return self._handle

    def _encode(self, record: Mapping[str, Any]) -> bytes:
        try:
            text = dump_exact(record)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"Cannot write a record to {self.path}: {error}. The record: {dict(record)!r:.200}"
            ) from error
        # A lone surrogate has no UTF-8; what backslashreplace makes of it is its escape in JSON.
        return f"{text}\n".encode(errors="backslashreplace")

    def _scan(self) -> tuple[list[bytes], list[dict[str, Any]], bool]:
        lines, is_cut_off = self._lines()
        return lines, [parse_line(line, self.path, number) for number, line in enumerate(lines, start=1)], is_cut_off

    def _lines(self) -> tuple[list[bytes], bool]:
        """The whole lines, and whether a cut-off one stands behind them."""
        reader = JournalReader(self.path)
        return [line for block in reader.blocks() for line in block.lines], reader.is_cut_off


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The record of a line; an error names the file and the line's number."""
    try:
        record = load_exact(line)
    except ValueError as error:
        raise _bad_line(line, path, number, str(error)) from error
    if not isinstance(record, dict):
        raise _bad_line(line, path, number, f"a {type(record).__name__}, not an object")
    return cast(dict[str, Any], record)


def _bad_line(line: bytes, path: Path, number: int, reason: str) -> RunError:
    return RunError(
        f"{path}:{number}: this line is not a JSON object ({reason}). Found: {line[:80]!r}. "
        "Only a last line can be cut off by a kill, so the file was changed or the disk is at fault: "
        "remove the line, or restore the file."
    )


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


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LOOKS_NON_FINITE = re.compile(r"\\*(NaN|-?Infinity)")


def dump_exact(value: Any) -> str:
    """One line of JSON.

    >>> print(dump_exact({"loss": float("nan"), "kl": 0.1, "text": "NaN"}))
    {"loss": "NaN", "kl": 0.1, "text": "\\\\NaN"}
    """
    return json.dumps(encode_exact(value), ensure_ascii=False, allow_nan=False)


def load_exact(text: str | bytes) -> Any:
    """The value that `dump_exact` was given.

    >>> load_exact(dump_exact([float("-inf"), "Infinity", "\\\\NaN", 0.1 + 0.2]))
    [-inf, 'Infinity', '\\\\NaN', 0.30000000000000004]
    """
    return decode_exact(json.loads(text))


def encode_exact(value: Any) -> Any:
    """`value` in JSON types. Numbers of numpy and torch become plain ones; other objects are a TypeError."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        return f"\\{value}" if _LOOKS_NON_FINITE.fullmatch(value) else value
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value)
        return {_key(key): encode_exact(item) for key, item in entries.items()}
    if isinstance(value, (list, tuple)):
        return [encode_exact(item) for item in cast(list[Any], value)]
    if isinstance(value, PurePath):
        return encode_exact(str(value))
    if hasattr(value, "item"):
        return encode_exact(value.item())
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def decode_exact(value: Any) -> Any:
    if isinstance(value, str) and _LOOKS_NON_FINITE.fullmatch(value):
        return value[1:] if value.startswith("\\") else _NON_FINITE[value]
    if isinstance(value, dict):
        return {key: decode_exact(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [decode_exact(item) for item in cast(list[Any], value)]
    return value


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is a {type(key).__name__}; JSON knows only texts as keys")
    return key


_HASH_BYTES = 8
_START = bytes(_HASH_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """What is not as it was written in a journal: from line `line` on, counted from 1."""

    file: Path
    line: int
    num_missing: int
    """Lines that the chain knows and that are not there any more, wherever they stood."""
    is_cut: bool
    """All lines that are there are as they were written: only the end is missing."""

    def __str__(self) -> str:
        missing = f"{self.num_missing:,} line{' is' if self.num_missing == 1 else 's are'} missing"
        if self.is_cut:
            return f"{self.file}: {missing} from line {self.line} on, which had been written"
        rest = f" ({missing} in all)" if self.num_missing else ""
        return f"{self.file}:{self.line}: not the line that was written: it was changed, or one was removed{rest}"


class Chain:
    """Hashes beside one journal: with them, a line that was changed or removed after it was written is noticed.

    `.metrics.jsonl.chain` holds 8 bytes a line of `metrics.jsonl`: the hash of that line and of the hash before it. A
    line is written first and its hash second, and a journal is cut after its chain is; so whatever a kill leaves, the
    chain covers the beginning of the journal, and the next writer takes the lines behind it in. Left out: somebody who
    writes the chain anew as well, and lines that were added at the end.
    """

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(f".{journal.name}.chain")
        self._handle: int | None = None
        self._last = _START

    def open(self, lines: Sequence[bytes]) -> None:
        """Make ready to append behind `lines`, all that the journal holds. Those not yet in the chain are taken in."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        count = min(os.fstat(handle).st_size // _HASH_BYTES, len(lines))
        os.ftruncate(handle, count * _HASH_BYTES)
        self._last = os.pread(handle, _HASH_BYTES, (count - 1) * _HASH_BYTES) if count else _START
        os.lseek(handle, 0, os.SEEK_END)
        self._handle = handle
        self.extend(lines[count:])

    def extend(self, lines: Iterable[bytes]) -> None:
        """Take in lines, without their newlines, that are in the journal now."""
        assert self._handle is not None
        hashes = _hashes(self._last, lines)
        if not hashes:
            return
        end = os.lseek(self._handle, 0, os.SEEK_CUR)
        if os.write(self._handle, hashes) < len(hashes):
            os.ftruncate(self._handle, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._last = hashes[-_HASH_BYTES:]

    def cut(self, count: int) -> None:
        """Forget all lines but the first `count`."""
        self.close()
        if self.path.exists() and self.path.stat().st_size > count * _HASH_BYTES:
            handle = os.open(self.path, os.O_RDWR)
            try:
                os.ftruncate(handle, count * _HASH_BYTES)
            finally:
                os.close(handle)

    def sync(self) -> None:
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def read(self) -> bytes | None:
        """The hashes, one behind the other; None where there is no chain, as beside a journal of an older version."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return content[: len(content) // _HASH_BYTES * _HASH_BYTES]


def first_alteration(file: Path, blocks: Iterable[Block], hashes: bytes) -> Alteration | None:
    """Where the lines of `file` leave the chain that was read before them; None where they do not."""
    last, num_lines, altered = _START, 0, None
    for block in blocks:
        if altered is None:  # behind the first altered line they are only counted
            expected = hashes[num_lines * _HASH_BYTES : (num_lines + block.num_lines) * _HASH_BYTES]
            found = _hashes(last, block.lines[: len(expected) // _HASH_BYTES])
            last = found[-_HASH_BYTES:] or last
            altered = num_lines + _num_equal(found, expected) + 1 if found != expected else None
        num_lines += block.num_lines
    num_missing = max(0, len(hashes) // _HASH_BYTES - num_lines)
    if altered is None and not num_missing:
        return None
    line, is_cut = altered or num_lines + 1, altered is None
    return Alteration(file=file, line=line, num_missing=num_missing, is_cut=is_cut)


def _hashes(last: bytes, lines: Iterable[bytes]) -> bytes:
    """The hashes of lines that follow one with the hash `last`, one behind the other."""
    hashes: list[bytes] = []
    for line in lines:
        last = blake2b(line, digest_size=_HASH_BYTES, key=last).digest()
        hashes.append(last)
    return b"".join(hashes)


def _num_equal(found: bytes, expected: bytes) -> int:
    """How many hashes at the beginning are the same."""
    starts = range(0, len(found), _HASH_BYTES)
    return next(n for n, at in enumerate(starts) if found[at : at + _HASH_BYTES] != expected[at : at + _HASH_BYTES])
