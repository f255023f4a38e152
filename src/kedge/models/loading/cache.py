"""Folders that are built once and then reused: converted models, the tiny one, the tokens of data.

A folder is written under another name and then renamed, so that a reader never sees half of it and two processes may
build it at the same time. Nothing is ever deleted from the cache here but what killed builders left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kedge.core.files import cache_root as cache_root
from kedge.core.files import fsync_folder


def build_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write` if it does not exist yet. An error in `write` leaves nothing behind."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    _sweep(folder.parent, own=partial)
    lock = _locked(partial)
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
        if lock is not None:
            os.close(lock)
    fsync_folder(folder.parent)
    return folder


_SETTLED_S = 60.0
"""A folder that is not locked may be so young that its builder is just about to lock it."""


def _locked(partial: Path) -> int | None:
    """A lock on a folder that is being built, which the kernel releases however the builder ends; None where the disk
    knows no locks."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(parent: Path, *, own: Path) -> None:
    """Remove the half-built folders whose builders are gone."""
    for partial in parent.glob(".*.partial"):
        with suppress(OSError):
            if partial == own or time.time() - partial.stat().st_mtime < _SETTLED_S:
                continue
            lock = _locked(partial)
            if lock is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(lock)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(folder)
