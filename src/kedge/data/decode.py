"""The bytes of one text file into rows: JSON Lines, a JSON array, CSV, plain lines; gzip by its magic bytes.

The layout is told by content, not by name, except that `.txt` is always a prompt a line, and `.csv` and `.tsv` are
tables with the names of their columns in the first line. One row is bounded: a line without an end must not fill the
memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import orjson

from kedge.core.errors import DataError
from kedge.data.examples import Origin

_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"\xfd7zXZ": "packed with xz",
    b"BZh": "packed with bzip2",
    b"ARROW1": "an Arrow file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    _PARQUET: "a gzipped Parquet file",
}
_ALLOWED = "Kedge reads JSON Lines, JSON arrays, CSV, TSV, Parquet, and text lines, plain or gzipped"
MOST_ROW_BYTES = 64 << 20
_SHOWN_RAW = 2000
_BUFFER_BYTES = 1 << 20
_HEAD_LINES = 20

Line = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the file has it: its fields, or the problem and the raw text of what could not be decoded."""

    origin: Origin
    fields: dict[str, Any] | None
    problem: str = ""
    raw: str = ""


def is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _PARQUET


def text_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP
        file.seek(0)
        # gzip's own readline is slow; a buffer around it is not.
        stream = io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=file)), _BUFFER_BYTES) if is_gzip else file
        name = path.name.removesuffix(".gz").lower()
        is_table = name.endswith((".csv", ".tsv"))
        lines = _lines(stream, path, keeps_blank=is_table)
        head = list(islice(lines, _HEAD_LINES))
        if not head:
            raise DataError(f"{path}: the file is empty")
        lines = chain(head, lines)
        if name.endswith(".txt"):
            yield from _plain(lines, path)
        elif is_table:
            yield from _table(lines, path, "\t" if name.endswith(".tsv") else ",")
        elif _is_json_lines(head, path):
            yield from _json_lines(lines, path)
        else:
            yield from _json_whole(lines, path)


def _lines(stream: io.BufferedReader, path: Path, *, keeps_blank: bool) -> Iterator[Line]:
    """Numbered lines with something on them, or all; refuses at the start what is not text."""
    number = 0
    try:
        _refuse_binary(stream.peek(8192)[:8192], path)
        while line := stream.readline(MOST_ROW_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MOST_ROW_BYTES and not line.endswith(b"\n") and not _is_array(line):
                yield number, _cut(stream, line)
            elif keeps_blank or line.strip():
                yield number, line.rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: the gzip stream breaks off after line {number} ({error}). "
            "The file is incomplete or damaged: fetch it or pack it again."
        ) from error


class _TooLong(bytes):
    """The beginning of a line that is longer than a row may be."""


def _is_array(line: bytes) -> bool:
    return line.lstrip()[:1] == b"["


def _cut(stream: io.BufferedReader, line: bytes) -> bytes:
    """Read on to the end of an endless line, and keep its beginning only."""
    while (rest := stream.readline(MOST_ROW_BYTES)) and not rest.endswith(b"\n"):
        pass
    return _TooLong(line[:_SHOWN_RAW])


def too_long(num_bytes: int | None = None) -> str:
    size = f" ({num_bytes >> 20:,} MiB)" if num_bytes else ""
    return f"the row is longer than {MOST_ROW_BYTES >> 20} MiB{size}, which no row of text is; look at what is in it"


def _refuse_binary(start: bytes, path: Path) -> None:
    for magic, description in _FOREIGN.items():
        if start.startswith(magic):
            raise DataError(f"{path}: this is {description}. {_ALLOWED}: unpack or convert it first.")
    if b"\0" in start:
        raise DataError(f"{path}: this is a binary file. {_ALLOWED}.")


def _is_json_lines(head: list[Line], path: Path) -> bool:
    objects = [value for _, line in head if isinstance(value := _try_json(line), dict)]
    start = head[0][1].lstrip()[:1]
    if start == b"[":
        return False
    if len(head) == 1 and objects and isinstance(objects[0].get("data"), list):
        return False
    if not objects and start != b"{":
        number, line = head[0]
        shown = line[:60].decode("utf-8", "backslashreplace").strip()
        raise DataError(f"{path}:{number}: neither a JSON object nor an array, but: {shown!r}. {_ALLOWED}.")
    return bool(objects)


def _try_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _json_lines(lines: Iterable[Line], path: Path) -> Iterator[Row]:
    name = str(path)
    for number, line in lines:
        origin = Origin(name, number)
        if isinstance(line, _TooLong):
            yield Row(origin, None, too_long(), line.decode("utf-8", "backslashreplace"))
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            yield Row(origin, None, _problem(line, error), line.decode("utf-8", "backslashreplace"))
        else:
            yield _object_row(value, origin)


def _object_row(value: Any, origin: Origin) -> Row:
    if isinstance(value, dict):
        return Row(origin, cast(dict[str, Any], value))
    raw = orjson.dumps(value).decode()
    return Row(origin, None, f"expected a JSON object, found {_JSON_NAMES[type(value)]}", raw)


_JSON_NAMES = {list: "an array", str: "text", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}


def _problem(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as invalid:
        return f"invalid UTF-8 at byte {invalid.start + 1} (0x{line[invalid.start]:02x})"
    hint = "; NaN and Infinity are not JSON" if b"NaN" in line or b"Infinity" in line else ""
    if "infinity" in error.msg:
        hint = "; the largest number is about 1.8e308"
    return f"invalid JSON at column {error.colno}: {error.msg}{hint}"


def _table(lines: Iterable[Line], path: Path, delimiter: str) -> Iterator[Row]:
    """Rows of a table; a cell without text is an absent field."""
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers.append(number)
            if isinstance(line, _TooLong):
                raise DataError(f"{path}:{number}: {too_long()}")
            yield line.decode() + "\n"

    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader)]
        _refuse_header(names, path, delimiter)
        start = len(numbers)
        for cells in reader:
            origin = Origin(str(path), numbers[start])
            start = len(numbers)
            if not cells:  # a blank line between rows
                continue
            if len(cells) != len(names):
                problem = f"{len(cells)} cells in a table of {len(names)} columns; is text with a delimiter unquoted?"
                yield Row(origin, None, problem, delimiter.join(cells)[:_SHOWN_RAW])
            else:
                yield Row(origin, {name: cell for name, cell in zip(names, cells, strict=True) if cell})
    except UnicodeDecodeError as invalid:
        raise DataError(
            f"{path}:{numbers[-1]}: invalid UTF-8 at byte {invalid.start + 1}; save it as UTF-8"
        ) from invalid
    except csv.Error as error:
        raise DataError(f"{path}:{numbers[-1]}: no table ({error}); is a quotation mark left open?") from error


def _refuse_header(names: list[str], path: Path, delimiter: str) -> None:
    if len(set(names)) < len(names) or not all(names):
        what = "a column without a name" if not all(names) else "two columns of one name"
        raise DataError(f"{path}:1: {what} ({', '.join(names)}); the first line must name every column")
    if len(names) == 1:
        other = next((sign for sign in (",", ";", "\t", "|") if sign != delimiter and sign in names[0]), None)
        if other is not None:
            raise DataError(f"{path}:1: one column ({names[0]!r}), split by {other!r}? .csv uses ',' and .tsv tabs")


def _json_whole(lines: Iterable[Line], path: Path) -> Iterator[Row]:
    numbered = list(lines)
    data = b"\n".join(line for _, line in numbered)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        is_array = data.lstrip().startswith(b"[")
        layout = "starts as a JSON array, but does not parse" if is_array else "neither JSON Lines nor one JSON object"
        raise DataError(
            f"{path}: {layout}: line {numbered[error.lineno - 1][0]}: "
            f"{_problem(data, error)}. "
            "Mend it, or write one object a line (JSON Lines)."
        ) from error
    if isinstance(value, dict):
        inner = cast(dict[str, Any], value).get("data")
        value = cast(list[Any], inner) if isinstance(inner, list) else [value]
    if not value:
        raise DataError(f"{path}: the array is empty")
    for number, item in enumerate(cast(list[Any], value), start=1):
        origin = Origin(str(path), number)
        size = len(orjson.dumps(item)) if len(data) > MOST_ROW_BYTES else 0
        yield Row(origin, None, too_long(size)) if size > MOST_ROW_BYTES else _object_row(item, origin)


def _plain(lines: Iterable[Line], path: Path) -> Iterator[Row]:
    for number, line in lines:
        origin = Origin(str(path), number)
        if isinstance(line, _TooLong):
            yield Row(origin, None, too_long(), line.decode("utf-8", "backslashreplace"))
            continue
        try:
            yield Row(origin, {"prompt": line.decode()})
        except UnicodeDecodeError as invalid:
            problem = f"invalid UTF-8 at byte {invalid.start + 1} (0x{line[invalid.start]:02x})"
            yield Row(origin, None, problem, line.decode("utf-8", "backslashreplace"))
