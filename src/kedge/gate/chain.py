"""Files of lines that are only ever added to: each line holds the hash of the one before, so that a change shows."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from kedge.core.errors import DataError
from kedge.core.files import hash_json

FIRST = "0" * 32
"""What stands for the line before the first one."""


def read_chain(file: Path) -> list[dict[str, Any]]:
    """All lines, in order; none where there is no file. A line that was changed, moved or taken out is an error."""
    return _parsed(file.read_bytes(), file) if file.is_file() else []


def append_chain(file: Path, make: Callable[[list[dict[str, Any]]], Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Add one line, made from those that are there, with nobody writing in between; None adds nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.seek(0)
        before = _parsed(opened.read(), file)
        record = make(before)
        if record is None:
            return None
        line = {**record, "previous": before[-1]["hash"] if before else FIRST}
        line["hash"] = hash_json(line)
        opened.write(orjson.dumps(line) + b"\n")
        opened.flush()
        os.fsync(opened.fileno())
    return line


def _parsed(content: bytes, file: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    previous = FIRST
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            line: dict[str, Any] = orjson.loads(text)
            own = line.get("hash")
            is_whole = own == hash_json({key: value for key, value in line.items() if key != "hash"})
        except (orjson.JSONDecodeError, AttributeError) as error:
            raise DataError(
                f"{file}:{number}: not a line of this file ({error}); restore it from your history"
            ) from error
        if not is_whole or line.get("previous") != previous:
            what = "was changed after it was written" if not is_whole else "does not follow the line before it"
            raise DataError(f"{file}:{number}: this line {what}; restore the file from your history")
        previous = str(own)
        lines.append(line)
    return lines
