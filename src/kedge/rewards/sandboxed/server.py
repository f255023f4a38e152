"""Starts programs: a small interpreter that is made ready once, and forks for each of them.

Forking takes a few milliseconds where starting an interpreter takes tens. For a program there are two processes: a
keeper, which this side trusts, and the program itself, the only process of its namespaces. The keeper ends the program
when the other end of its socket is shut, and says at last how it ended.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kedge.rewards.sandboxed import confine, folders, kernel, listener, namespaces, program

_REPORT, _HANDOVER = 3, 4
_LOOK_S = 0.01
"""How often the folder and the threads of a program are looked at where nothing else bounds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What all programs of this server have in common."""

    has_namespaces: bool
    network: bool
    libraries: tuple[str, ...]
    packages: tuple[str, ...]
    proc: int = -1
    scratch: str = ""
    is_nobody: bool = True
    counts_threads: bool = False
    """Whether threads have to be counted, since the kernel does not bound them."""


def main(fd: int, setup: dict[str, Any]) -> None:
    """Prepare, say what can be locked here, then serve until the other end is closed."""
    line = socket.socket(fileno=fd)
    os.environ.pop("PWD", None)  # which bubblewrap sets
    try:
        place = _prepare(setup)
        locks = _locks(place)
    except OSError as error:
        line.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries keepers
    if place.has_namespaces:
        confine.prepare_filter(network=place.network)
    gc.collect()
    gc.freeze()
    line.sendall(json.dumps({"locks": locks}).encode() + b"\n")
    while True:
        sign, handles, _, _ = socket.recv_fds(line, 1, 4)
        if not sign:
            return
        try:
            if os.fork() == 0:
                line.close()
                _in_child(lambda handles=handles: _keep(place, handles))
        except OSError:
            pass  # no process left: the closed socket says so
        for handle in handles:
            os.close(handle)


def _prepare(setup: dict[str, Any]) -> Place:
    libraries, network = setup["folders"], setup["network"]
    common: dict[str, Any] = {
        "network": network,
        "libraries": tuple(libraries),
        "packages": tuple(setup["packages"]),
        "has_namespaces": setup["layer"] != "limits",
    }
    match setup["layer"]:
        case "namespaces":
            proc = namespaces.enter(libraries, network=network)
            return Place(proc=proc, counts_threads=not _succeeds(_threads_are_bounded), **common)
        case "bubblewrap":  # which has already made the namespaces
            proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
            return Place(proc=proc, counts_threads=not _succeeds(_threads_are_bounded), **common)
        case _:
            is_nobody = os.geteuid() != 0 or _succeeds(_read_as_nobody)
            proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC) if os.path.isdir("/proc") else -1
            return Place(scratch=setup["scratch"], is_nobody=is_nobody, proc=proc, counts_threads=True, **common)


def _locks(place: Place) -> dict[str, bool]:
    """What can be kept from programs here, found by trying."""
    if sys.platform != "linux":
        return {"calls": False, "files": False, "counts": False, "nobody": place.is_nobody}

    def files() -> bool:
        confine.give_up_privileges(kernel.libc)
        return confine.lock_files(kernel.libc, os.getcwd(), place.libraries, network=place.network)

    def calls() -> bool:
        confine.give_up_privileges(kernel.libc)
        return confine.lock_calls(kernel.libc, network=place.network, own_files=place.has_namespaces)

    def counts() -> bool:
        confine.give_up_privileges(kernel.libc)
        return confine.listen_to_calls(kernel.libc) >= 0

    tried = {"calls": _succeeds(calls), "files": _succeeds(files), "counts": place.counts_threads and _succeeds(counts)}
    return tried | {"nobody": place.is_nobody}


def _threads_are_bounded() -> bool:
    """Not where the user is the machine's root by another name, whom the kernel lets go on."""
    namespaces.become_nobody()
    kernel.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        child = os.fork()
    except BlockingIOError:
        return True
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return False


def _read_as_nobody() -> bool:
    namespaces.become_nobody()
    with open(str(os.__file__)) as file:
        return bool(file.read(1))


def _succeeds(action: Callable[[], bool]) -> bool:
    """Whether an action works, tried in a child that is then thrown away."""
    child = os.fork()
    if child == 0:
        _in_child(lambda: 0 if action() else 1)
    return os.waitpid(child, 0)[1] == 0


def _in_child(action: Callable[[], int | None]) -> None:
    code = 1
    try:
        code = action() or 0
    finally:
        os._exit(code)


def _keep(place: Place, handles: list[int]) -> None:
    """Start the program that the socket orders, watch it, and say how it ended."""
    control = socket.socket(fileno=handles[0])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        kernel.prctl(1, signal.SIGKILL)  # end with the server
    order = _read_order(control)
    work = namespaces.WORK
    try:
        if place.has_namespaces:
            namespaces.enter_for_program(
                place.proc, megabytes=order["limits"]["disk_mb"], files=order["limits"]["files"]
            )
        else:
            work = _make_folder(place)
        ours, theirs = socket.socketpair()
        child = os.fork()
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode())
        return
    if child == 0:
        _in_child(lambda: _become(place, order, work, [*handles, theirs.fileno()]))
    theirs.close()
    for handle in handles[1:]:
        os.close(handle)
    quota = folders.Quota("" if place.has_namespaces else work, order["limits"], proc=place.proc)
    questions = listener.receive(ours, quota)
    stopped = _watch(child, control, quota if place.counts_threads else None, questions)
    _, status, usage = os.wait4(child, 0)
    if not place.has_namespaces:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # where nothing keeps a program from starting others
        folders.remove(work)
    ending = {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime, "stopped": stopped}
    control.sendall(json.dumps(ending).encode())


def _read_order(control: socket.socket) -> dict[str, Any]:
    with control.makefile("rb") as file:
        return json.loads(file.read(int(file.readline())))


def _make_folder(place: Place) -> str:
    folder = f"{place.scratch}/{os.getpid()}-{time.monotonic_ns()}"
    os.mkdir(folder, 0o700)
    if os.geteuid() == 0 and place.is_nobody:
        os.chown(folder, namespaces.NOBODY, namespaces.NOBODY)
    return folder


def _watch(child: int, control: socket.socket, quota: folders.Quota | None, questions: listener.Listener | None) -> str:
    """Wait until the program has ended; end it when the other side shuts the socket, or over its quota."""
    handle = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    poll = select.poll()
    for source in (control, handle, questions and questions.handle):
        if source is not None:
            poll.register(source, select.POLLIN)
    wait_ms = None if quota is None and handle is not None else _LOOK_S * 1000
    look_at = time.monotonic() + _LOOK_S
    while True:
        ready = dict(poll.poll(wait_ms))
        if handle in ready:
            return ""
        if handle is None and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return ""
        broken = ""
        if questions is not None and questions.handle in ready:
            if ready[questions.handle] & select.POLLIN:
                broken = questions.answer(child)
            else:  # nobody is left who could ask
                poll.unregister(questions.handle)
        if quota is not None and not broken and time.monotonic() >= look_at:
            broken = quota.broken(child)
            look_at = time.monotonic() + _LOOK_S
        if control.fileno() in ready or broken:
            os.kill(child, signal.SIGKILL)
            return broken


def _become(place: Place, order: dict[str, Any], work: str, handles: list[int]) -> None:
    """From here on this process belongs to the program."""
    os.setsid()
    os.chdir(work)
    nowhere = os.open("/dev/null", os.O_WRONLY)
    sources = (handles[1], handles[2], nowhere, handles[3], handles[4])
    above = [
        fcntl.fcntl(source, fcntl.F_DUPFD, 16) for source in sources
    ]  # where no target takes a later source's place
    for target, source in enumerate(above):
        os.dup2(source, target, inheritable=False)
    os.closerange(_HANDOVER + 1, 4096)
    if place.is_nobody and not place.has_namespaces:
        namespaces.become_nobody()
    confine.bound_resources(order["limits"], alone=place.has_namespaces)
    if sys.platform == "linux":
        _lock(place, work, set(order["locks"]))
    os.close(_HANDOVER)
    sys.path.extend(place.packages)
    gc.enable()
    program.serve(order, _REPORT)


def _lock(place: Place, work: str, needed: set[str]) -> None:
    """Every lock that the machine has; one that is `needed` and does not close ends the process."""
    kernel.drop_capabilities()
    confine.give_up_privileges(kernel.libc)
    locked = {
        "counts": _hand_over() if place.counts_threads else False,
        "files": confine.lock_files(kernel.libc, work, place.libraries, network=place.network),
        "calls": confine.lock_calls(kernel.libc, network=place.network, own_files=place.has_namespaces),
    }
    if any(not locked[name] for name in needed):
        os._exit(1)


def _hand_over() -> bool:
    """Give the keeper the handle by which calls are answered. The program must not have it: it would answer itself."""
    handle = confine.listen_to_calls(kernel.libc)
    if handle < 0:
        return False
    line = socket.socket(fileno=_HANDOVER)
    socket.send_fds(line, [b"x"], [handle])
    line.detach()
    os.close(handle)
    return True
