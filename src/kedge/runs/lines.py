"""The one reader of journals: whole lines in blocks, from where it stopped, however long the file is.

Resumed runs, reports and live pages read through it. A last line without its newline waits: its writer was killed, or
is at work. Left out: what a line means.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kedge.core.errors import RunError

_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Whole lines, the place of their first byte in the file, and the number of the first line."""

    data: bytes
    offset: int
    number: int
    num_lines: int

    @property
    def lines(self) -> list[bytes]:
        """Without their newlines."""
        return self.data[:-1].split(b"\n")


class JournalReader:
    """New lines of one file at every call of `blocks`. `is_rewound` says that it was replaced since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_rewound = False
        self.is_cut_off = False
        """The file ends in a line without its newline, which was not read."""
        self._offset = 0
        self._num_lines = 0
        self._file: tuple[int, int] | None = None
        """Device and number of the file that the offset belongs to."""

    def blocks(self) -> Iterator[Block]:
        """What was appended. A file that was replaced, as a resumed run does, is read from its beginning."""
        try:
            with self.path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                self._notice_rewind(status)
                yield from self._blocks(file, status.st_size)
        except FileNotFoundError:
            self.is_rewound, self.is_cut_off = self._file is not None, False
            self._file, self._offset, self._num_lines = None, 0, 0
        except OSError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"Cannot read {self.path}: {error.strerror}.") from error

    def _notice_rewind(self, status: os.stat_result) -> None:
        identity = (status.st_dev, status.st_ino)
        self.is_rewound = self._file is not None and (identity != self._file or status.st_size < self._offset)
        if self.is_rewound:
            self._offset, self._num_lines = 0, 0
        self._file = identity

    def _blocks(self, file: FileIO, size: int) -> Iterator[Block]:
        """Up to `size` bytes, no more: a device that stands in the file's place may have no end."""
        file.seek(self._offset)
        half = b""
        while more := file.read(max(0, min(_BLOCK_BYTES, size - file.tell()))):
            end = more.rfind(b"\n") + 1
            if not end:
                half += more
                continue
            data = half + more[:end]
            block = Block(data=data, offset=self._offset, number=self._num_lines + 1, num_lines=data.count(b"\n"))
            half = more[end:]
            self._offset += len(block.data)
            self._num_lines += block.num_lines
            yield block
        self.is_cut_off = bool(half)
