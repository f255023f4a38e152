"""Calls of Linux that Python has no name for. Each raises OSError where the kernel refuses."""

from __future__ import annotations

import ctypes
import os
from typing import Any

NEW_NS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_RECURSE_AT, _AT_CWD = 0x8000, -100
_CAPABILITIES_3 = 0x20080522

libc: Any = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result, unless it says that the call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    checked(libc.unshare(flags), "unshare")


def prctl(option: int, first: Any, second: Any = 0) -> None:
    checked(libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def mount_tmpfs(place: str, options: str) -> None:
    flags = NO_SUID | NO_DEV
    checked(libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", flags, options.encode()), f"tmpfs on {place}")


def keep_mounts_private() -> None:
    checked(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "private mounts")


def bind(source: str, place: str) -> None:
    """`source` is also seen at `place`, with what is mounted below it."""
    flags = _BIND | _RECURSIVE
    checked(libc.mount(os.fsencode(source), os.fsencode(place), None, flags, None), f"{source} at {place}")


def set_mount_flags(place: str, flags: int) -> None:
    """Add flags to the mount at `place` and to those below it."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc.syscall(_MOUNT_SETATTR, _AT_CWD, os.fsencode(place), _RECURSE_AT, ctypes.byref(attributes), size)
    checked(result, f"flags of {place}")


def pivot_root(new: str, old: str) -> None:
    checked(libc.syscall(_PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(old)), "pivot_root")


def detach(place: str) -> None:
    checked(libc.umount2(os.fsencode(place), _DETACH), f"umount {place}")


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    checked(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
