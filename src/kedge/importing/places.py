"""Where the data and models of a configuration are, as a recipe names them; and how many rows a file has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, cast

from kedge.importing.rules import Source

MAX_COUNTED: Final = 2**30
"""Bytes of a file that are read to count its rows."""
_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".arrow")


def found(name: str, beside: Path) -> Path | None:
    """The file or folder that a relative path means: as seen from the working folder, or from the configuration."""
    for start in (Path(), beside):
        try:
            if (start / name).exists():
                return start / name
        except OSError:  # no file can have such a name
            return None
    return None


def place(name: str, source: Source) -> str:
    """A model or file as the recipe names it: relative to its own folder where it is there, else as it is."""
    path = found(name, source.file.parent)
    if path is None or Path(name).is_absolute():
        return name
    here, there = source.folder.resolve(), path.resolve()
    is_far = (
        os.path.splitdrive(here)[0] != os.path.splitdrive(there)[0]
        or len(Path(os.path.commonpath([here, there])).parts) < 2
    )
    return there.as_posix() if is_far else Path(os.path.relpath(there, here)).as_posix()


def data_place(
    name: str, source: Source, *, config: Any = None, split: Any = None, revision: Any = None, files: Any = None
) -> str:
    """A dataset: a file that is there or looks like one, or one of the hub (`hub:org/name/config@x:split`)."""
    if files:
        names = cast("list[Any]", files) if isinstance(files, list) else [files]
        if len(names) == 1:
            return place(str(names[0]), source)
    if found(name, source.file.parent) is not None or name.startswith((".", "/", "~")) or name.endswith(_SUFFIXES):
        return place(name, source)
    parts = [
        f"hub:{name}",
        f"/{config}" if config else "",
        f"@{revision}" if revision else "",
        f":{str(split or 'train').partition('[')[0]}",
    ]
    return "".join(parts)


def num_rows(name: str | None, beside: Path) -> int | None:
    """The rows of a file of JSON Lines or a JSON array; None where that is not known without reading more."""
    path = found(name, beside) if name else None
    try:
        if path is None or not path.is_file() or path.stat().st_size > MAX_COUNTED:
            return None
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip()) or None
        rows: Any = json.loads(path.read_bytes()) if path.suffix == ".json" else None
        return len(cast("list[Any]", rows)) or None if isinstance(rows, list) else None
    except (OSError, ValueError, RecursionError):
        return None
