"""Encoded examples as rows of an Arrow table, in memory or mapped from a file, read in any order by row number.

A mapped table costs no memory of its own: the system reads pages in and drops them as it likes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ItemT = TypeVar("ItemT")
NewT = TypeVar("NewT")
Rows = NDArray[np.int64]

BATCH_ROWS = 2048
"""Rows of each record batch of a file but the last: row r is in batch r // BATCH_ROWS."""

TYPES: Mapping[str, pa.DataType] = {
    "tokens": pa.list_(pa.int32()),
    "mask": pa.list_(pa.bool_()),
    "token_lists": pa.list_(pa.list_(pa.int32())),
    "masks": pa.list_(pa.list_(pa.bool_())),
    "numbers": pa.list_(pa.int64()),
    "flags": pa.list_(pa.bool_()),
    "texts": pa.list_(pa.large_string()),
    "text": pa.large_string(),
    "key": pa.uint64(),
    "number": pa.int64(),
    "fraction": pa.float64(),
}
"""What a column may hold."""
Columns = Mapping[str, str]
"""The columns of a table by name; each is one of `TYPES`."""


def record_batch(rows: Sequence[Mapping[str, Any]], columns: Columns) -> pa.RecordBatch:
    """Rows as one record batch."""
    arrays = [_array([row[name] for row in rows], TYPES[kind]) for name, kind in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as an Arrow array; lists of numbers by way of numpy, which is far faster than number by number."""
    if not pa.types.is_list(kind):
        return pa.array(values, type=kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    if values and all(isinstance(value, np.ndarray) for value in values):
        inner = pa.array(np.concatenate(values), type=kind.value_type)
    else:
        inner = _array(list(chain.from_iterable(values)), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), inner, type=kind)


def write_table(path: Path, batches: Iterable[pa.RecordBatch], columns: Columns) -> int:
    """Write batches of any size as one file of batches of `BATCH_ROWS`; returns the number of rows."""
    schema = pa.schema([(name, TYPES[kind]) for name, kind in columns.items()])
    waiting: list[pa.RecordBatch] = []
    num_waiting = num_rows = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            waiting.append(batch)
            num_waiting += batch.num_rows
            num_rows += batch.num_rows
            if num_waiting >= BATCH_ROWS:
                joined = pa.Table.from_batches(waiting, schema).combine_chunks()
                num_whole = num_waiting - num_waiting % BATCH_ROWS
                writer.write_table(joined.slice(0, num_whole), max_chunksize=BATCH_ROWS)
                waiting = joined.slice(num_whole).to_batches()
                num_waiting -= num_whole
        if num_waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema).combine_chunks())
    return num_rows


class TokenTable:
    """A table of encoded examples; values are read as Python lists, texts and numbers."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_rows: int, batch_rows: int) -> None:
        self._batches = batches
        self._num_rows = num_rows
        self._batch_rows = batch_rows
        self._scalars: dict[str, NDArray[Any]] = {}

    @classmethod
    def in_memory(cls, rows: Sequence[Mapping[str, Any]], columns: Columns) -> TokenTable:
        return cls([record_batch(rows, columns)], len(rows), max(len(rows), 1))

    @classmethod
    def mapped(cls, path: Path) -> TokenTable:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        return cls(batches, sum(batch.num_rows for batch in batches), BATCH_ROWS)

    def __len__(self) -> int:
        return self._num_rows

    def value(self, name: str, row: int) -> Any:
        """One value: a list of numbers for tokens and masks, a list of lists for lists of them."""
        number, at = divmod(row, self._batch_rows)
        return _plain(self._batches[number].column(name)[at])

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers as an array: eight bytes a row."""
        if name not in self._scalars:
            parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches]
            self._scalars[name] = np.concatenate(parts)
        return self._scalars[name]


def _plain(value: pa.Scalar) -> Any:
    if not isinstance(value, pa.ListScalar):
        return value.as_py()
    values = cast(pa.Array, value.values)
    if pa.types.is_list(values.type) or pa.types.is_large_string(values.type):
        return [_plain(item) for item in values]
    return values.to_numpy(zero_copy_only=False).tolist()


class LazyRows(Sequence[ItemT], Generic[ItemT]):
    """Items that are made when they are asked for, from the row that each stands for. A slice is lazy too.

    `columns` has numbers about every row that can be had without making its item.
    """

    def __init__(
        self,
        make: Callable[[int], ItemT],
        rows: Sequence[int] | Rows,
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self._make = make
        self._rows = rows
        self._columns = columns or {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> LazyRows[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | LazyRows[ItemT]:
        if isinstance(index, slice):
            return LazyRows(self._make, self._rows[index], self._columns)
        return self._make(int(self._rows[index]))

    def __eq__(self, other: object) -> bool:
        """Whether a sequence holds equal items; all of them are made for it."""
        if not isinstance(other, Sequence):
            return NotImplemented
        others = cast("Sequence[Any]", other)
        return len(self) == len(others) and all(mine == its for mine, its in zip(self, others, strict=True))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def column(self, name: str) -> NDArray[Any]:
        """One number for each item."""
        return self._columns[name][np.asarray(self._rows, dtype=np.int64)]

    def take(self, places: NDArray[np.bool_]) -> LazyRows[ItemT]:
        """The items where a mask over all of them is True."""
        return LazyRows(self._make, np.asarray(self._rows, dtype=np.int64)[places], self._columns)

    def map(self, change: Callable[[ItemT], NewT]) -> LazyRows[NewT]:
        """The same rows as something else."""
        make = self._make
        return LazyRows(lambda row: change(make(row)), self._rows, self._columns)


def lazy_map(change: Callable[[ItemT], NewT], items: Sequence[ItemT]) -> LazyRows[NewT]:
    """`change` of each item when it is asked for."""
    return LazyRows(lambda place: change(items[place]), range(len(items)))


def joined(parts: Sequence[Sequence[ItemT]]) -> LazyRows[ItemT]:
    """The items of all parts, one part after the other."""
    ends = list(accumulate(len(part) for part in parts))

    def item(place: int) -> ItemT:
        number = bisect_right(ends, place)
        return parts[number][place - (ends[number - 1] if number else 0)]

    return LazyRows(item, range(ends[-1] if ends else 0))
