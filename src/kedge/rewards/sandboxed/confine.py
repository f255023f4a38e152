"""Gives up powers, in the process that is about to run a program: resource limits, capabilities, files, system calls.

Each lock stands by itself, so that one that breaks or is missing leaves the others.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

from kedge.rewards.sandboxed import seccomp

_END_WITH_PARENT, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2
_SECCOMP, _SET_FILTER, _NEW_LISTENER = {"x86_64": 317, "aarch64": 277}, 1, 8
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 1 << 1, 1 << 2, 1 << 3
_CHANGE_TREE = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, pipes, sockets, devices
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_TCP = 3  # bind and connect
_SCOPED = 3  # no abstract sockets of, and no signals to, processes outside
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
THREADS, OPEN_FILES = 64, 64


def bound_resources(limits: dict[str, Any], *, alone: bool) -> None:
    """Processor time, memory, size of a file, open files, locked memory, signals in flight.

    `alone` says that the process shares its user with no other: elsewhere a bound on threads would count them too.
    """
    bounds = {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_mb"] << 20,
        "RLIMIT_FSIZE": limits["file_mb"] << 20,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 64,
        "RLIMIT_NICE": 0,
        "RLIMIT_RTPRIO": 0,
    }
    if alone:
        bounds["RLIMIT_NPROC"] = THREADS
    if sys.platform != "linux":
        del bounds["RLIMIT_AS"]  # macOS refuses a bound on address space
    for name, limit in bounds.items():
        if hasattr(resource, name):
            # A second of processor time between the signal and the end: the signal says that it was the time. The only
            # process of a namespace does not feel it, and is ended at once.
            _bound(getattr(resource, name), limit, spare=1 if name == "RLIMIT_CPU" and not alone else 0)


def _bound(name: int, limit: int, *, spare: int) -> None:
    """Set a resource limit to the smaller of `limit` and what the machine allows anyway."""
    _, allowed = resource.getrlimit(name)
    hard = limit + spare
    hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
    resource.setrlimit(name, (min(limit, hard), hard))


def give_up_privileges(libc: Any) -> None:
    """End with the parent, and gain nothing by starting programs. After every change of user, which would undo it."""
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def lock_files(libc: Any, work: str, libraries: Sequence[str], *, network: bool) -> bool:
    """Landlock: change only what is below `work`, read only that and `libraries`, start no program.

    False where the kernel cannot, or cannot keep files from being cut short (before Linux 6.2).
    """
    level = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if level < 3:
        return False
    change = _WRITE_FILE | _CHANGE_TREE | _REFER | _TRUNCATE
    read = _READ_FILE | _READ_FOLDER
    handled = [change | read | _EXECUTE | (_IOCTL_DEVICE if level >= 5 else 0)]
    handled += [0 if network else _TCP] if level >= 4 else []
    handled += [_SCOPED] if level >= 6 else []
    attributes = struct.pack(f"{len(handled)}Q", *handled)
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    places = {work: change | read, **dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)}
    for place, access in (dict.fromkeys(libraries, read) | places).items():
        _allow_below(libc, ruleset, place, access)
    result = libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return result == 0


def _allow_below(libc: Any, ruleset: int, place: str, access: int) -> None:
    try:
        at = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    if not os.path.isdir(place):
        access &= _READ_FILE | _WRITE_FILE
    libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, at), 0)
    os.close(at)


def prepare_filter(*, network: bool) -> None:
    """Make the filter for the first process of a namespace ahead of time."""
    if os.uname().machine in seccomp.ARCHITECTURES:
        seccomp.filter_program(os.uname().machine, pid=1, network=network, own_files=True)


def lock_calls(libc: Any, *, network: bool, own_files: bool) -> bool:
    """The list of allowed system calls. False where this processor or kernel has no such filter."""
    if not _has_filters():
        return False
    program = seccomp.filter_program(os.uname().machine, pid=os.getpid(), network=network, own_files=own_files)
    head, _memory = _as_kernel_wants(program)
    return libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0


def listen_to_calls(libc: Any) -> int:
    """Have the kernel ask before this process makes a file or a thread; gives the handle by which it is answered.

    -1 where it cannot: before Linux 5.5, or where a container listens already.
    """
    release = [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]]
    if not _has_filters() or release < [5, 5]:
        return -1
    machine = os.uname().machine
    head, _memory = _as_kernel_wants(seccomp.asking_program(machine))
    return libc.syscall(_SECCOMP[machine], _SET_FILTER, _NEW_LISTENER, ctypes.c_void_p(ctypes.addressof(head)))


def _has_filters() -> bool:
    return sys.platform == "linux" and os.uname().machine in seccomp.ARCHITECTURES and sys.maxsize >= 2**32


def _as_kernel_wants(program: bytes) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    """The head of a filter, and the memory that it points to."""
    memory = ctypes.create_string_buffer(program, len(program))
    return ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(memory))), memory
