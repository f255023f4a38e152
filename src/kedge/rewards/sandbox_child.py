"""What runs inside the sandbox: gives up every power it can, then runs the code and reports through a pipe.

Started by `kedge.rewards.sandbox` as a script, with the standard library alone. The order comes on stdin as JSON, the
report goes out as lines of JSON that begin with a token. The locks are those of Linux (user and network namespace,
seccomp, Landlock, rlimits); what could not be locked is reported, and the parent decides.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

_NEW_USER, _NEW_NET, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000
_END_WITH_PARENT, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Numbers of system calls on x86_64 and aarch64; None where there is no such call.
_NEVER: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),  # it opens sockets behind the filter's back
}
_ON_ITSELF = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}
_SOCKET, _CLONE, _CLONE3 = (41, 198), (56, 220), (435, 435)
_CLONE_THREAD = 0x00010000
_EPERM, _ENOSYS = 1, 38
_RETURN, _LOAD, _EQUAL, _AT_LEAST, _ANY_BIT = 0x06, 0x20, 0x15, 0x35, 0x45
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ = 1 << 1, (1 << 2) | (1 << 3)
_CHANGE_TREE = sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, pipes, sockets, devices
_REFER, _TRUNCATE = 1 << 13, 1 << 14


def filter_program(architecture: str, *, pid: int, network: bool) -> bytes:
    """A seccomp filter: no new process, no program, no signal to others, no socket unless `network`."""
    column, audit = _ARCHITECTURES[architecture]
    deny = (_RETURN, 0, 0, _ERRNO | _EPERM)
    rules: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    rules += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), deny]  # the x32 numbers of x86_64
    never = [number[column] for number in _NEVER.values()] + ([] if network else [_SOCKET[column]])
    for number in never:
        if number is not None:
            rules += [(_EQUAL, 0, 1, number), deny]
    # glibc falls back to clone, whose flags can be looked at.
    rules += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    rules += [(_EQUAL, 0, 3, _CLONE[column]), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD), deny]
    rules += [(_LOAD, 0, 0, 0)]
    for numbers in _ON_ITSELF.values():
        own = [(_LOAD, 0, 0, 16), (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, pid), deny, (_LOAD, 0, 0, 0)]
        rules += [(_EQUAL, 0, len(own), numbers[column]), *own]
    rules.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


def _cut_namespaces(libc: Any, *, network: bool) -> bool:
    """Leave the user, and unless allowed the network, behind. Root here is nobody outside."""
    return libc.unshare(_NEW_USER | _NEW_IPC | (0 if network else _NEW_NET)) == 0


def _cut_calls(libc: Any, *, network: bool) -> bool:
    if platform.machine() not in _ARCHITECTURES:
        return False
    program = filter_program(platform.machine(), pid=os.getpid(), network=network)
    memory = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(memory)))
    return libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0


def _cut_files(libc: Any, folder: str) -> bool:
    """Landlock: change only what is below `folder`, read only that and what Python itself is made of."""
    level = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if level < 1:
        return False
    change = _WRITE_FILE | _CHANGE_TREE | (_REFER if level >= 2 else 0) | (_TRUNCATE if level >= 3 else 0)
    handled = struct.pack("Q", change | _READ)
    rules = libc.syscall(_LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return False
    on_file = change & (_WRITE_FILE | _TRUNCATE)
    places = {folder: change | _READ, "/dev/null": on_file | (1 << 2)}
    libraries = {sys.prefix, sys.base_prefix, sys.base_exec_prefix, "/usr/lib", "/usr/share", "/lib", "/lib64"}
    places |= dict.fromkeys(libraries, _READ) | dict.fromkeys(("/dev/urandom", "/etc/localtime"), 1 << 2)
    for place, access in places.items():
        if os.path.exists(place):
            at = os.open(place, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, at), 0)
            os.close(at)
    return libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0


def confine(limits: dict[str, Any]) -> dict[str, bool]:
    """Give up what can be given up; says which of network, processes and files are out of reach from now on."""
    network = limits["network"] == "allowed"
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform != "linux":
        del bounds[resource.RLIMIT_AS]  # macOS refuses a bound on address space
    for name, limit in bounds.items():
        _bound(name, limit)
    if sys.platform != "linux":
        return {"network": network, "processes": False, "files": False}
    libc: Any = ctypes.CDLL(None, use_errno=True)
    is_alone = _cut_namespaces(libc, network=network)
    if is_alone:  # elsewhere the bound would count all processes of the user
        _bound(resource.RLIMIT_NPROC, 64)
    libc.prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)  # after the namespaces, which would forget it
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    has_no_files = _cut_files(libc, os.getcwd())
    has_no_calls = _cut_calls(libc, network=network)
    return {"network": network or is_alone or has_no_calls, "processes": has_no_calls, "files": has_no_files}


def _bound(name: int, limit: int) -> None:
    """Set a resource limit to the smaller of `limit` and what the machine allows anyway."""
    _, allowed = resource.getrlimit(name)
    # One second of processor time between the signal and the end: the signal says that it was the time.
    hard = limit + 1 if name == resource.RLIMIT_CPU else limit
    hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
    resource.setrlimit(name, (min(limit, hard), hard))


def run(order: dict[str, Any], report: Callable[..., None]) -> None:
    """Run the program, then its checks, and report how each of them ended."""
    checks: list[str] = order["checks"]
    name = "solution" if checks else "__main__"  # checks come from outside: the guard of a script stays shut
    module = types.ModuleType(name)
    sys.modules[name] = module
    for leave in ("exit", "quit"):  # left out together with `site`
        setattr(builtins, leave, sys.exit)
    ending, detail = _attempt(order["code"], "<answer>", module)
    if ending == "exit" and not checks and detail in ("None", "0"):
        ending, detail = "done", ""
    if ending == "done":
        for index, check in enumerate(checks):
            check_ending, reason = _attempt(check, f"<check {index + 1}>", module)
            report(check=index, passed=check_ending == "done", detail=reason)
    if ending == "exit":
        ending, detail = "exception", f"sys.exit({detail})"
    report(end=ending, detail=detail)


def _attempt(code: str, name: str, module: types.ModuleType) -> tuple[str, str]:
    try:
        exec(compile(code, name, "exec"), vars(module))
    except SystemExit as error:
        return "exit", str(error.code)
    except MemoryError:
        return "memory", "MemoryError"
    except BaseException as error:  # whatever the code raises is a fact about it, not a failure of ours
        return "exception", f"{type(error).__name__}: {error}"[:500]
    return "done", ""


def _give_stdin(text: str) -> None:
    """From here on fd 0 is the program's input; the order, which holds the token, is gone."""
    fd = os.open("stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
    sys.stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115 (lives on)


def main(report_fd: int) -> None:
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    token: str = order.pop("token")

    def report(**fields: Any) -> None:
        os.write(report_fd, f"{token}{json.dumps(fields)}\n".encode())

    _give_stdin(order["stdin"])
    locks = confine(order["limits"])
    report(ready=locks)
    if locks["network"]:
        run(order, report)
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)  # no thread or exit handler of the code outlives it


if __name__ == "__main__":
    main(int(sys.argv[1]))
