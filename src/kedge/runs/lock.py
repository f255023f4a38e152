"""One writer a run: an advisory lock on `.lock`, which the kernel releases however the writer ends.

Left out: network disks. On NFS without a lock service, and between machines on some cluster file systems, `flock`
holds only within one machine; keep a run's folder on a disk where one machine writes it. POSIX only.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakSet

from kedge.core.errors import RunError
from kedge.core.files import run_errors

LOCK_NAME = ".lock"
_ATTEMPTS, _PAUSE_S = 10, 0.02
"""A reader that calls `held_by` has a shared lock for an instant; that must not turn a writer away."""


class Lock:
    """Held from creation (`acquire`) until `release`, or until the process ends in any way."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        _held_here.add(self)

    def release(self) -> None:
        """The file stays: removing it would let two writers lock two files of the same name."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def acquire(folder: Path) -> Lock:
    path = folder / LOCK_NAME
    with run_errors("lock", path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock_or_name_holder(handle, folder)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(holder).encode(), 0)
        except BaseException:
            os.close(handle)
            raise
    return Lock(handle)


def held_by(folder: Path) -> str | None:
    """The process that writes to `folder` now, in words; None when there is none."""
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(handle)
    finally:
        os.close(handle)
    return None


def _lock_or_name_holder(handle: int, folder: Path) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_PAUSE_S)
    raise RunError(
        f"{folder} is being written by {_holder(handle)}. One writer a run: wait until it ends, or stop it, "
        f"then try again (its progress: kedge watch {folder})."
    )


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError):
        return "another process (which has not yet said who it is)"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_held_here: WeakSet[Lock] = WeakSet()


def _drop_after_fork() -> None:
    # A forked worker shares the lock: were the writer killed, an orphan of it would keep the run locked.
    for lock in list(_held_here):
        lock.release()


os.register_at_fork(after_in_child=_drop_after_fork)
