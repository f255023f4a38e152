"""What a program sees of the machine: a root of its own with Python's libraries, read-only, and a folder in memory.

`enter` is called once by the server, `enter_for_program` by the process that each program gets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kedge.rewards.sandboxed import kernel

NOBODY = 65534
WORK = "/program"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_DUMPABLE = 4


def enter(folders: Mapping[str, str], *, network: bool) -> int:
    """Leave the machine for namespaces with nothing in them but `folders` (where they are seen, and where they really
    are); gives a handle on /proc, through which maps of users are written."""
    flags = kernel.NEW_USER | kernel.NEW_NS | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
    flags |= 0 if network else kernel.NEW_NET
    if os.geteuid() == 0 and _is_mapped(NOBODY):
        _unshare_with_nobody(flags)
    else:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(flags)
        _map_user(os.open("/proc", os.O_PATH), uid, gid)
    kernel.keep_mounts_private()
    handle = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    _build_root(folders)
    return handle


def enter_for_program(proc: int, *, megabytes: int, files: int) -> None:
    """User, process, mount and message namespaces of this program alone, and its folder: a tmpfs with a quota."""
    become_nobody()
    kernel.prctl(_DUMPABLE, 1)  # else the kernel gives the map of the user to root
    flags = kernel.NEW_USER | kernel.NEW_PID | kernel.NEW_NS | kernel.NEW_IPC
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(flags)
    _map_user(proc, uid, gid)
    owner = f"uid={NOBODY},gid={NOBODY},mode=700"
    kernel.mount_tmpfs(WORK, f"size={megabytes}m,nr_inodes={files},{owner}")


def become_nobody() -> None:
    """Give up the user for one that owns nothing, where this is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _is_mapped(uid: int) -> bool:
    with open("/proc/self/uid_map") as file:
        rows = [[int(number) for number in line.split()] for line in file]
    return any(first <= uid < first + count for first, _, count in rows)


def _map_user(proc: int, uid: int, gid: int) -> None:
    """Nobody inside is who this was outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        _write_at(proc, f"self/{name}", text)


def _unshare_with_nobody(flags: int) -> None:
    """For root: both root and nobody exist inside. Only a process that stays outside may write such a map."""
    os.setgroups([])
    reader, writer = os.pipe()
    me = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        os.close(writer)
        os.read(reader, 1)
        proc = os.open("/proc", os.O_PATH)
        try:
            for name in ("uid_map", "gid_map"):
                _write_at(proc, f"{me}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1")
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(reader)
    try:
        kernel.unshare(flags)
        os.write(writer, b"x")
    finally:
        os.close(writer)
        _, status = os.waitpid(mapper, 0)
    if status != 0:
        raise OSError("the map of users could not be written")


def _write_at(folder: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _build_root(folders: Mapping[str, str]) -> None:
    kernel.mount_tmpfs("/tmp", "size=1m,nr_inodes=1k,mode=755")
    os.makedirs("/tmp/new/dev")
    os.mkdir("/tmp/old")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for place, real in folders.items():
        _show(place, real, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEV)
    for device in DEVICES:
        _show(device, device, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_EXEC)
    os.mkdir(f"/new{WORK}")
    kernel.bind("/new", "/new")
    kernel.detach("/old")
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")
    kernel.set_mount_flags("/", kernel.READ_ONLY)


def _show(place: str, real: str, flags: int) -> None:
    """What is `real` on the machine, at `place` of the new root."""
    source = f"/old{real}"
    if not os.path.exists(source):
        return
    target = f"/new{place}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.bind(source, target)
    kernel.set_mount_flags(target, flags)
