"""The records of journals as readers need them: metrics by column, other records left on disk until asked for.

Both grow with their file: `poll` reads only what was appended, and starts again where a resumed run replaced it.
"""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast, overload

import orjson

from kedge.core.metric_table import MetricTable
from kedge.runs.journal import parse_line
from kedge.runs.lines import Block, JournalReader

_BATCH = 256
"""Records that are read and parsed together where all of them are asked for."""


class MetricFeed:
    """`metrics.jsonl` as a table. `only` names the metrics to keep; None keeps all."""

    def __init__(self, path: Path, *, only: Collection[str] | None = None) -> None:
        self._reader = JournalReader(path)
        self._only = only
        self.table = MetricTable(only=only)

    @property
    def is_cut_off(self) -> bool:
        return self._reader.is_cut_off

    def poll(self) -> bool:
        """Read new rows; True where there were some, or the file was replaced. Then the table is another one."""
        return _poll(self._reader, self._restart, lambda block: self.table.extend(_rows(block, self._reader.path)))

    def _restart(self) -> None:
        self.table = MetricTable(only=self._only)


class LazyRecords(Sequence[dict[str, Any]]):
    """Records that stay in their file: places are kept, and a record is parsed when asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = array("q")
        self._lengths = array("q")
        self._handle = -1

    def extend(self, block: Block) -> None:
        if self._handle < 0:
            # kept open: a run that is resumed puts another file in its place, and these are the places of this one
            self._handle = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
        place = block.offset
        for line in block.lines:
            self._places.append(place)
            self._lengths.append(len(line))
            place += len(line) + 1

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return _exact(os.pread(self._handle, self._lengths[row], self._places[row]), self._path, row + 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """In batches: neighbours are read and parsed together, in a third of the time that they take one by one."""
        size = len(self)
        for start in range(0, size, _BATCH):
            yield from self._batch(start, min(start + _BATCH, size))

    def _batch(self, start: int, end: int) -> list[dict[str, Any]]:
        place = self._places[start]
        data = os.pread(self._handle, self._places[end - 1] + self._lengths[end - 1] + 1 - place, place)
        if b"NaN" in data or b"Infinity" in data:
            return [self[row] for row in range(start, end)]
        return _rows(Block(data=data, offset=place, number=start + 1, num_lines=end - start), self._path)


class RecordFeed:
    """`events.jsonl` or `samples.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._reader = JournalReader(path)
        self.records = LazyRecords(path)

    @property
    def is_cut_off(self) -> bool:
        return self._reader.is_cut_off

    def poll(self) -> bool:
        """Read the places of new records; True where there were some, or the file was replaced."""
        return _poll(self._reader, self._restart, lambda block: self.records.extend(block))

    def _restart(self) -> None:
        self.records = LazyRecords(self._reader.path)


def _poll(reader: JournalReader, restart: Callable[[], None], extend: Callable[[Block], None]) -> bool:
    """Hand on what was appended, after a new start where the file was replaced; whether there was anything."""
    is_new = False
    for block in reader.blocks():
        if reader.is_rewound and not is_new:
            restart()
        extend(block)
        is_new = True
    if reader.is_rewound and not is_new:
        restart()
    return is_new or reader.is_rewound


def read_metrics(path: Path, *, only: Collection[str] | None = None) -> MetricFeed:
    """Everything that is in the file by now."""
    feed = MetricFeed(path, only=only)
    feed.poll()
    return feed


def read_records(path: Path) -> RecordFeed:
    """Everything that is in the file by now."""
    feed = RecordFeed(path)
    feed.poll()
    return feed


def _rows(block: Block, path: Path) -> list[dict[str, Any]]:
    """The records of a block, parsed in one go where every line is an object as it should be."""
    try:
        rows = cast(list[dict[str, Any]], orjson.loads(b"[%b]" % block.data[:-1].replace(b"\n", b",")))
        if len(rows) == block.num_lines and all(type(row) is dict for row in rows):
            return rows
    except ValueError:
        pass
    return [_fast(line, path, block.number + at) for at, line in enumerate(block.lines)]


def _fast(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """A row of metrics; what is not finite stays the text that it was written as."""
    try:
        record = orjson.loads(line)
    except ValueError:  # what orjson refuses may still be a line of ours
        return parse_line(line, path, number)
    return cast(dict[str, Any], record) if isinstance(record, dict) else parse_line(line, path, number)


def _exact(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """A record as it was written. Lines with a mark of what is not finite take the long way."""
    return (parse_line if b"NaN" in line or b"Infinity" in line else _fast)(line, path, number)
