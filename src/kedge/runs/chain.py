"""A chain of hashes beside a journal: with it, a line that was changed or removed after it was written is noticed.

`.metrics.jsonl.chain` holds 8 bytes a line of `metrics.jsonl`: the hash of that line and of the hash before it. A line
is written first and its hash second, and a journal is cut after its chain is; so whatever a kill leaves, the chain
covers the beginning of the journal, and the next writer takes the lines behind it in. Left out: somebody who writes the
chain anew as well, and lines that were added at the end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

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
    """The hashes beside one journal. The file is created by the first `extend`."""

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
        last, hashes = self._last, bytearray()
        for line in lines:
            last = _next(last, line)
            hashes += last
        if not hashes:
            return
        end = os.lseek(self._handle, 0, os.SEEK_CUR)
        if os.write(self._handle, hashes) < len(hashes):
            os.ftruncate(self._handle, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._last = last

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

    def read(self) -> list[bytes] | None:
        """The hashes; None where there is no chain, as beside a journal of an older version."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        whole = len(content) // _HASH_BYTES
        return [content[at * _HASH_BYTES : (at + 1) * _HASH_BYTES] for at in range(whole)]


def first_alteration(file: Path, lines: Sequence[bytes], hashes: Sequence[bytes]) -> Alteration | None:
    """Where the lines of `file` leave the chain that was read before them; None where they do not."""
    num_missing = max(0, len(hashes) - len(lines))
    last = _START
    for number, (line, expected) in enumerate(zip(lines, hashes, strict=False), start=1):
        last = _next(last, line)
        if last != expected:
            return Alteration(file=file, line=number, num_missing=num_missing, is_cut=False)
    return Alteration(file=file, line=len(lines) + 1, num_missing=num_missing, is_cut=True) if num_missing else None


def _next(before: bytes, line: bytes) -> bytes:
    return blake2b(line, digest_size=_HASH_BYTES, key=before).digest()
