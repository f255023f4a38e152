"""The metrics of a run by column: a float64 array a metric, so that 100,000 steps take memory by the byte.

A `MetricTable` is also a sequence of rows like a list of dicts, for readers that look at single steps. Left out: values
that are not numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rows = Sequence[Mapping[str, Any]]

_MOST_AT_ONCE = 4096
"""Rows that are turned into columns together."""
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
"""How a journal writes numbers that JSON lacks."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows. A metric is in `present` only where some of these rows lack it."""

    size: int
    values: dict[str, Floats]
    present: dict[str, Flags]


_NOTHING: tuple[Floats, Flags, int] = (np.empty(0), np.empty(0, dtype=np.bool_), 0)


class MetricTable(Sequence[Mapping[str, Any]]):
    """Metrics by name and row, in the order of their first occurrence. `only` names those to keep; None keeps all.

    >>> table = MetricTable([{"step": 1, "kl": 0.5}, {"step": 2}, {"step": 3, "kl": float("nan")}])
    >>> len(table), table.names, table.column("kl")[1].tolist()
    (3, ('step', 'kl'), [0.5, nan])
    >>> dict(table[1]), table[0].get("kl"), "kl" in table[1]
    ({'step': 2}, 0.5, False)
    """

    def __init__(self, records: Rows = (), *, only: Collection[str] | None = None) -> None:
        self._only = only
        self._parts: list[_Part] = []
        self._columns: dict[str, tuple[Floats, Flags, int]] = {}
        """Joined when asked for: values, presence, and how many of the parts are in it."""
        self._names: dict[str, None] = {}
        self._size = 0
        self.extend(records)

    def extend(self, records: Rows) -> None:
        """Add rows at the end."""
        for start in range(0, len(records), _MOST_AT_ONCE):
            part = _part(records[start : start + _MOST_AT_ONCE], self._only)
            self._parts.append(part)
            self._names.update(dict.fromkeys(part.values))
            self._size += part.size

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def values(self, name: str) -> Floats:
        """One value a row; NaN where a row lacks the metric."""
        return self._column(name)[0]

    def present(self, name: str) -> Flags:
        """Whether a row has the metric."""
        return self._column(name)[1]

    def column(self, name: str) -> tuple[NDArray[np.intp], Floats]:
        """The rows that have a metric, and its values there, finite or not."""
        values, present = self._column(name)
        rows = np.flatnonzero(present)
        return rows, values[rows]

    def finite(self, name: str) -> Floats:
        """The finite values of a metric, in order."""
        values = self.values(name)
        return values[np.isfinite(values)]

    def _column(self, name: str) -> tuple[Floats, Flags]:
        values, present, num_joined = self._columns.get(name, _NOTHING)
        if num_joined < len(self._parts):
            new = self._parts[num_joined:]
            values = np.concatenate([values, *(part.values.get(name, _missing(part.size)) for part in new)])
            present = np.concatenate([present, *(_presence(part, name) for part in new)])
            self._columns[name] = (values, present, len(self._parts))
            for part in new:  # the joined column takes the place of its parts
                part.values.pop(name, None)
                part.present.pop(name, None)
        return values, present

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> MetricRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> MetricRow | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [MetricRow(self, row) for row in range(*index.indices(self._size))]
        row = index + self._size if index < 0 else index
        if not 0 <= row < self._size:
            raise IndexError(f"row {index} of {self._size}")
        return MetricRow(self, row)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (MetricRow(self, row) for row in range(self._size))


class MetricRow(Mapping[str, Any]):
    """One row of a table, read when asked for. Steps are whole numbers, metrics are floats."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: MetricTable, row: int) -> None:
        self._table = table
        self._row = row

    def __getitem__(self, name: str) -> Any:
        if not self._table.present(name)[self._row]:
            raise KeyError(name)
        value = float(self._table.values(name)[self._row])
        return int(value) if name == "step" and value.is_integer() else value

    def get(self, name: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[name] if self._table.present(name)[self._row] else default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._table.present(name)[self._row])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def as_table(records: Rows) -> MetricTable:
    """The records by column; a table is returned as it is."""
    return records if isinstance(records, MetricTable) else MetricTable(records)


def _part(records: Rows, only: Collection[str] | None) -> _Part:
    """Records with the same names are taken together: rows of a run have a few sets of names, not one each."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for row, record in enumerate(records):
        alike.setdefault(tuple(record), []).append(row)
    size = len(records)
    names = dict.fromkeys(name for group in alike for name in group if only is None or name in only)
    columns = _Columns(names, size)
    for group, rows in alike.items():
        those = records if len(rows) == size else [records[row] for row in rows]
        _add_alike(columns, [name for name in group if name in names], np.array(rows, dtype=np.intp), those)
    return columns.part()


class _Columns:
    """The columns of a part while they are filled, as the rows of one matrix."""

    def __init__(self, names: Iterable[str], size: int) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._values = np.full((len(self._numbers), size), np.nan)
        self._rows: dict[str, list[NDArray[np.intp]]] = {}
        """Where each metric was put, in the order in which they came."""
        self._size = size

    def put(self, names: Sequence[str], rows: NDArray[np.intp], values: Floats) -> None:
        """The values of some metrics, a row each, at some rows of the part."""
        numbers = np.array([self._numbers[name] for name in names], dtype=np.intp)
        if len(rows) == self._size:
            self._values[numbers] = values
        else:
            self._values[numbers[:, None], rows] = values
        for name in names:
            self._rows.setdefault(name, []).append(rows)

    def part(self) -> _Part:
        present: dict[str, Flags] = {}
        for name, rows in self._rows.items():
            if sum(map(len, rows)) < self._size:
                present[name] = np.zeros(self._size, dtype=np.bool_)
                present[name][np.concatenate(rows)] = True
        values = {name: self._values[self._numbers[name]] for name in self._rows}
        return _Part(size=self._size, values=values, present=present)


def _add_alike(columns: _Columns, names: Sequence[str], rows: NDArray[np.intp], records: Rows) -> None:
    numeric = [name for name in names if _number(records[0][name]) is not None]
    try:
        matrix = _matrix(records, numeric, is_whole=len(numeric) == len(records[0]))
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # below the first row is something that is no number
        _add_singly(columns, names, rows, records)
        return
    columns.put(numeric, rows, matrix.T)


def _matrix(records: Rows, names: Sequence[str], *, is_whole: bool) -> Floats:
    """`is_whole`: the records have these names alone, in this order."""
    if is_whole:
        flat: Iterable[Any] = chain.from_iterable([record.values() for record in records])
    elif len(names) < 2:  # itemgetter of one name gives no tuple
        flat = (record[name] for record in records for name in names)
    else:
        flat = chain.from_iterable(map(itemgetter(*names), records))
    count = len(records) * len(names)
    return np.fromiter(flat, np.float64, count=count).reshape(len(records), len(names))


def _add_singly(columns: _Columns, names: Sequence[str], rows: NDArray[np.intp], records: Rows) -> None:
    for name in names:
        numbers = [_number(record[name]) for record in records]
        given = [at for at, number in enumerate(numbers) if number is not None]
        if given:
            columns.put([name], rows[given], np.array([[numbers[at] for at in given]], dtype=np.float64))


def _presence(part: _Part, name: str) -> Flags:
    if name in part.present:
        return part.present[name]
    return np.full(part.size, name in part.values)


def _missing(size: int) -> Floats:
    return np.full(size, np.nan)


def _number(value: object) -> float | None:
    """The number that a record holds; None for anything else.

    >>> _number(3), _number("NaN"), _number("a"), _number(True)
    (3.0, nan, None, None)
    """
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in _NON_FINITE):
        return None
    try:
        return float(cast(float, value))
    except OverflowError:  # an integer beyond every float
        return float("inf") if cast(int, value) > 0 else float("-inf")
