"""The folder of a program where no tmpfs bounds it: how much is in it, and taking it away. Any depth, any names."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kedge.rewards.sandboxed import confine

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_STOP_S = 2.0


class Quota:
    """Tells which bound a program has passed that nothing else keeps: threads, and bytes and files of its folder.

    `broken` looks at all of them. `before_file` and `before_thread` are asked before one is made (see `listener`).
    """

    def __init__(self, folder: str, limits: dict[str, Any], *, proc: int) -> None:
        self._folder, self._proc = folder, proc
        self._bytes = limits["disk_mb"] << 20
        self._files, self._file_bytes = limits["files"], limits["file_mb"] << 20
        self._spare = limits["files"]

    def broken(self, pid: int) -> str:
        with suppress(OSError):  # it has just ended, or there is no /proc
            if _count(f"{pid}/task", self._proc) > confine.THREADS:
                return "threads"
        return self._disk(pid) if self._folder else ""

    def before_thread(self, pid: int) -> str:
        with suppress(OSError):
            if _count(f"{pid}/task", self._proc) >= confine.THREADS:
                return "threads"
        return ""

    def before_file(self, pid: int) -> str:
        """Counts down what may still be made. At the end of that the folder is counted: what was removed is no more."""
        if self._folder and self._spare <= 0:
            self._spare = self._left(pid)
        if self._folder and self._spare <= 0:
            return "disk"
        self._spare -= 1
        return ""

    def not_made(self) -> None:
        """The file that was counted was not made."""
        self._spare += 1

    def _left(self, pid: int) -> int:
        """How many files may still be made, counted while the program stands still: it could move them about."""
        if not _stop(pid):
            return 0
        try:
            files, _ = usage(self._folder, at_most=self._files)
            return self._files - files - unlinked(pid, self._folder, largest=0)[0]
        except OSError:  # a folder that cannot be looked into
            return 0
        finally:
            os.kill(pid, signal.SIGCONT)

    def _disk(self, pid: int) -> str:
        try:
            files, size = usage(self._folder, at_most=self._files)
        except OSError:
            return "disk"
        size += unlinked(pid, self._folder, largest=self._file_bytes)[1]
        return "disk" if files > self._files or size > self._bytes else ""


def _stop(pid: int) -> bool:
    """Whether all threads of a child stand still, or it has ended. One that goes on and on may outrun this."""
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        os.kill(pid, signal.SIGSTOP)
        if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.0005)
    return False


def _count(name: str, at: int) -> int:
    folder = os.open(name, _FOLDER, dir_fd=at)
    try:
        return len(os.listdir(folder))
    finally:
        os.close(folder)


def unlinked(pid: int, folder: str, *, largest: int) -> tuple[int, int]:
    """Files and bytes that a process holds open or mapped, and that no folder names any more.

    How large a file is that is only mapped cannot be seen: it counts as `largest`.
    """
    sizes: dict[tuple[int, int], int] = {}
    with suppress(OSError):  # it has just ended, or there is no /proc
        for address in _mapped(pid, folder):
            sizes[address] = largest
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return len(sizes), sum(sizes.values())


def _mapped(pid: int, folder: str) -> Iterator[tuple[int, int]]:
    """Device and inode of the files below a folder that are mapped and have been removed."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{folder}/") and fields[5].endswith(" (deleted)"):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                yield os.makedev(major, minor), int(fields[4])


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
