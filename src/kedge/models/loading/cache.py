"""Folders that are built once and then reused: converted models and the tiny one.

A folder is written under another name and then renamed, so that a reader never sees half of it and two processes may
build it at the same time. Nothing is ever deleted from the cache here.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from kedge.core.files import fsync_folder


def cache_root() -> Path:
    """`$KEDGE_CACHE`, else `kedge` below `$XDG_CACHE_HOME`, else `~/.cache/kedge`."""
    if own := os.environ.get("KEDGE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kedge"
    return Path.home() / ".cache" / "kedge"


def build_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write` if it does not exist yet. An error in `write` leaves nothing behind."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        write(partial)
        _flush(partial)
        partial.rename(folder)
    except OSError:
        # A folder cannot be renamed onto a filled one: another process was faster, and its folder is as good as ours.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    fsync_folder(folder.parent)
    return folder


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)
