"""The folder of a program where no tmpfs bounds it: how much is in it, and taking it away. Any depth, any names."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any

from kedge.rewards.sandboxed import confine

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Quota:
    """Tells which bound a program has passed that nothing else keeps: threads, and bytes and files of its folder."""

    def __init__(self, folder: str, limits: dict[str, Any], *, proc: int) -> None:
        self._folder, self._proc = folder, proc
        self._bytes = limits["disk_mb"] << 20
        self._files = limits["files"]

    def broken(self, pid: int) -> str:
        with suppress(OSError):  # it has just ended, or there is no /proc
            if _count(f"{pid}/task", self._proc) > confine.THREADS:
                return "threads"
        return self._disk(pid) if self._folder else ""

    def _disk(self, pid: int) -> str:
        try:
            files, size = usage(self._folder, at_most=self._files)
        except OSError:  # a folder that cannot be looked into
            return "disk"
        size += unlinked(pid)
        return "disk" if files > self._files or size > self._bytes else ""


def _count(name: str, at: int) -> int:
    folder = os.open(name, _FOLDER, dir_fd=at)
    try:
        return len(os.listdir(folder))
    finally:
        os.close(folder)


def unlinked(pid: int) -> int:
    """Bytes of the files that a process holds open and that no folder names any more."""
    size = 0
    with suppress(OSError):  # it has just ended, or there is no /proc
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                size += status.st_blocks * 512 if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) else 0
    return size


def usage(folder: str, *, at_most: int) -> tuple[int, int]:
    """Files and bytes below a folder; stops counting beyond `at_most` files. Follows no link, changes nothing."""
    files, size = 0, 0
    waiting = [os.open(folder, _FOLDER)]
    try:
        while waiting and files <= at_most:
            at = waiting.pop()
            try:
                for name in os.listdir(at):
                    files += 1
                    with suppress(FileNotFoundError, NotADirectoryError):  # it changes while it is counted
                        status = os.stat(name, dir_fd=at, follow_symlinks=False)
                        size += status.st_blocks * 512
                        if files <= at_most and stat.S_ISDIR(status.st_mode):
                            waiting.append(os.open(name, _FOLDER, dir_fd=at))
            finally:
                os.close(at)
    finally:
        for at in waiting:
            os.close(at)
    return files, size


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, by moving what lies deeper to the top: no path grows long.

    Only after its program has ended: rights are given back on the way.
    """
    with suppress(OSError):
        at = os.open(folder, _FOLDER)
        try:
            while names := os.listdir(at):
                for name in names:
                    _remove_level(at, name)
        finally:
            os.close(at)
        os.rmdir(folder)


def _remove_level(at: int, name: str) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return
    os.chmod(name, 0o700, dir_fd=at)
    inner = os.open(name, _FOLDER, dir_fd=at)
    try:
        for child in os.listdir(inner):
            if stat.S_ISDIR(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
                os.chmod(child, 0o700, dir_fd=inner)
                os.rename(child, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=at)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=at)
