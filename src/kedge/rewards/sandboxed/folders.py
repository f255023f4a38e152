"""The folder of a program where no tmpfs bounds it: how much is in it, and taking it away. Any depth, any names."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from kedge.rewards.sandboxed import confine

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Quota:
    """Tells which bound a program has passed: bytes and files of its folder, or threads."""

    def __init__(self, folder: str, limits: dict[str, Any]) -> None:
        self._folder = folder
        self._bytes = limits["disk_mb"] << 20
        self._files = limits["files"]

    def broken(self, pid: int) -> str:
        try:
            files, size = usage(self._folder, at_most=self._files)
        except OSError:  # a folder that cannot be looked into
            return "disk"
        if files > self._files or size > self._bytes:
            return "disk"
        with suppress(OSError):  # it has just ended, or there is no /proc
            if len(os.listdir(f"/proc/{pid}/task")) > confine.THREADS:
                return "threads"
        return ""


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
                        if files <= at_most and _is_folder(status.st_mode):
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
    if not _is_folder(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return
    os.chmod(name, 0o700, dir_fd=at)
    inner = os.open(name, _FOLDER, dir_fd=at)
    try:
        for child in os.listdir(inner):
            if _is_folder(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
                os.chmod(child, 0o700, dir_fd=inner)
                os.rename(child, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=at)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=at)


def _is_folder(mode: int) -> bool:
    return mode & 0o170000 == 0o040000
