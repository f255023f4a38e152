"""A sealed folder: `checkpoint.json` lists its files with sizes and hashes, so that damage can be detected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import CheckpointError
from kedge.core.files import fsync_folder, write_json
from kedge.core.hashing import hash_file
from kedge.runs import exact_json

SEAL_NAME = "checkpoint.json"


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the list, with `facts` beside it, and flush everything to disk."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "hash": hash_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_json(folder / SEAL_NAME, exact_json.encode({**facts, "files": files}))
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_folder(path)
        elif path.name != SEAL_NAME:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(folder)


def read_sealed(folder: Path, *, check_hashes: bool) -> dict[str, Any]:
    """The facts, after checking that every listed file has the right size (and hash). Other files are ignored."""
    path = folder / SEAL_NAME
    try:
        facts = cast(dict[str, Any], exact_json.loads(path.read_bytes()))
        for name, expected in facts.pop("files").items():
            _check_file(folder / name, expected, check_hashes=check_hashes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the folder was cut off, or copied in part") from error
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return facts


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _check_file(path: Path, expected: Mapping[str, Any], *, check_hashes: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    if (size := path.stat().st_size) != expected["size"]:
        raise CheckpointError(f"{path} has {size} bytes instead of {expected['size']}")
    if check_hashes and hash_file(path) != expected["hash"]:
        raise CheckpointError(f"{path} has changed since it was written (its hash differs)")
