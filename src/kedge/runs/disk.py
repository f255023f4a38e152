"""Errors of the disk as messages that help: full, read-only, or something else, and what to do about it."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kedge.core.errors import KedgeError, RunError

_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PARTIAL = re.compile(r"\..+\.\d+\.partial")
"""The name that `kedge.core.files` gives a file while it writes it."""


@contextmanager
def run_errors(doing: str, path: Path) -> Generator[None]:
    """Turn an OSError into a RunError about `path`; our own errors pass."""
    try:
        yield
    except KedgeError:
        raise
    except OSError as error:
        raise RunError(f"Cannot {doing} {path}: {explain(error, path)}") from error


def explain(error: OSError, path: Path) -> str:
    if is_disk_full(error):
        return f"the disk is full ({readable_bytes(free_bytes(path))} free). Free some space, then resume the run."
    if error.errno in _READ_ONLY:
        return f"it is read-only for this user ({error.strerror}). Choose a folder that you may write to."
    return f"{error.strerror or error}."


def is_disk_full(error: BaseException) -> bool:
    """By error number or by text: libraries that write in native code (safetensors) raise errors of their own."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return "No space left on device" in str(error)


def clear_partial_files(folder: Path) -> list[str]:
    """Remove the files that a killed writer had not yet put in place; returns their names."""
    partial = [path for path in sorted(folder.glob(".*.partial")) if _PARTIAL.fullmatch(path.name) and path.is_file()]
    with run_errors("clear up", folder):
        for path in partial:
            path.unlink()
    return [path.name for path in partial]


def free_bytes(path: Path) -> int:
    """Free space on the disk that holds `path`, or would hold it."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def readable_bytes(size: int) -> str:
    """
    >>> readable_bytes(999), readable_bytes(3 * 1024**3 + 2**29)
    ('999 bytes', '3.5 GiB')
    """
    if size < 1024:
        return f"{size} bytes"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"
