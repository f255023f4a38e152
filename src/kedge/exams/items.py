"""The files of an exam: rows of JSON Lines, fields that must be there, an even part of them, and the hash of all."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from kedge.core.errors import DataError
from kedge.core.files import hash_bytes, hash_file, hash_json
from kedge.core.quoting import quoted

ITEMS, SHOTS, ABOUT = "items.jsonl", "shots.jsonl", "about.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file; what is asked of it in vain is an error with the file, the line and the field."""

    fields: Mapping[str, Any]
    where: str

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._typed(name, (str, int, float), "a text", default))

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._typed(name, (list,), "a list of texts", None)
        if not values or not all(isinstance(value, str | int | float) for value in values):
            raise self.problem(name, "one text or more", values)
        return tuple(map(str, values))

    def number(self, name: str) -> int:
        return int(self._typed(name, (int,), "a whole number", None))

    def place(self, name: str, count: int) -> int:
        """The index of one of `count` choices."""
        value = self.number(name)
        if not 0 <= value < count:
            raise self.problem(name, f"the number of a choice, from 0 to {count - 1}", value)
        return value

    def one_of(self, name: str, options: Sequence[str], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in options:
            raise self.problem(name, f"one of {', '.join(options)}", value)
        return value

    def problem(self, name: str, wanted: str, value: Any) -> DataError:
        return DataError(f"{self.where}: {name}: expected {wanted}, found {quoted(value)}")

    def _typed(self, name: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.fields.get(name, default)
        if name not in self.fields and default is None:
            raise DataError(
                f"{self.where}: the field `{name}` is missing, expected {wanted}; there are {', '.join(self.fields)}"
            )
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.problem(name, wanted, value)
        return value


def read_rows(file: Path) -> list[Row]:
    """The objects of a JSON Lines file, gzipped or not; one that is broken is an error, since an item less is another
    exam."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    rows = [_row(line, f"{file}:{number}") for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not rows:
        raise DataError(f"{file}: no items in it")
    return rows


def _row(line: bytes, where: str) -> Row:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected an object with fields, found {quoted(fields)}")
    return Row(cast(dict[str, Any], fields), where)


def unique_ids(rows: Iterable[Row], name: str = "id") -> list[str]:
    """The names of items, which results are told apart by."""
    first: dict[str, str] = {}
    for row in rows:
        item = row.text(name)
        if item in first:
            raise DataError(f"{row.where}: {name}: {quoted(item)} is also the {name} of {first[item]}")
        first[item] = row.where
    return list(first)


def write_items(file: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    lines = [orjson.dumps(row) + b"\n" for row in rows]
    file.write_bytes(b"".join(lines))
    return len(lines)


def hash_of_files(folder: Path, **how: Any) -> str:
    """Of the items and shots in a folder, and of how they are asked and graded."""
    files = {name: hash_file(folder / name) for name in (ITEMS, SHOTS) if (folder / name).is_file()}
    return hash_json([files, how])


def hash_of_text(text: str) -> str:
    return hash_bytes(text.encode(errors="surrogatepass"))


def evenly(rows: Sequence[T], count: int) -> list[T]:
    """So many rows, taken at even distances: a file that is sorted by subject keeps its subjects.

    >>> evenly("abcdefg", 3)
    ['a', 'c', 'e']
    """
    if count >= len(rows):
        return list(rows)
    return [rows[number * len(rows) // count] for number in range(count)]


def copy_part(folder: Path, to: Path, limit: int) -> None:
    """The files of an exam with at most so many of its items."""
    for file in folder.iterdir():
        if file.is_file() and file.name != ITEMS:
            shutil.copyfile(file, to / file.name)
    lines = [line for line in (folder / ITEMS).read_bytes().splitlines(keepends=True) if line.strip()]
    (to / ITEMS).write_bytes(b"".join(evenly(lines, limit)))
