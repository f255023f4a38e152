"""Runs code that nobody has read, each program in a process of its own that sees nothing and reaches nobody.

What is promised is what `tests/rewards/attacks.py` tries. With `isolation: bubblewrap` or `namespaces` a program

- sees Python, its libraries and a folder of its own, in memory and gone afterwards; no other file, process, environment
- opens no socket, starts no process, signals nobody, traces nobody, changes nobody's priority, limits or files
- has bounds of time, memory, output, threads, open files, and of bytes and files on its disk
- leaves nothing behind: no process, no file, no shared memory
- cannot make an assertion hold that compares with a literal, or output that is compared: see `assertions`

`limits` promises the same but for what `isolation.WEAKNESSES` lists. Nowhere prevented: bugs of the kernel, what can be
told from the load of the machine, and a check that is no assertion (a loop, `with`), which reports from inside the
program's process.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kedge.rewards import isolation
from kedge.rewards.assertions import failure_of, steps_of

Ending = Literal["done", "exception", "timeout", "memory", "output", "disk", "threads", "crash", "unstarted"]
"""All but the last are facts about the code; `unstarted` is one about this machine."""

_REPORT_BYTES = 1 << 20
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    wall_s: float = 10.0
    """Counted from the first line of the code, not from the start of its process."""
    cpu_s: int = 10
    memory_mb: int = 512
    output_bytes: int = 1 << 16
    file_mb: int = 16
    """The largest file."""
    disk_mb: int = 64
    """All files together."""
    files: int = 4096
    """Files and folders together."""
    network: isolation.Network = "none"
    isolation: isolation.Isolation = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program, what it reads on stdin, and statements to run after it that must not raise."""

    code: str
    stdin: str = ""
    checks: tuple[str, ...] = ()
    uses_packages: bool = False
    """Whether installed packages can be imported, besides the standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    passed: tuple[bool, ...]
    """One for each check; False also where it was never reached."""
    ending: Ending
    """How the program itself ended; a check that raises does not count here."""
    detail: str
    stdout: str


def run_all(jobs: Sequence[Job], limits: Limits, *, workers: int) -> list[Outcome]:
    """The outcomes in the order of the jobs, `workers` of them running at once."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(lambda job: run(job, limits), jobs))


def run(job: Job, limits: Limits) -> Outcome:
    """Run a job in a process of its own, which is gone when this returns. ConfigError where code must not run here."""
    layer = isolation.choose(limits.isolation, limits.network)
    token = secrets.token_hex(16)
    try:
        trace = _execute(job, limits, token, layer)
    except (OSError, ValueError) as error:  # no memory, no process left, or the server has died
        return _unstarted(job, str(error))
    lines = _lines(trace.report, token)
    if not lines:
        return _unstarted(job, trace.error or f"no sign of life ({trace.stopped or trace.code})")
    return _outcome(job, lines, trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """What is left of a program that has ended."""

    stopped: Ending | None
    code: int | None
    stdout: bytes
    report: bytes
    error: str


def _execute(job: Job, limits: Limits, token: str, layer: isolation.Layer) -> _Trace:
    wall = isolation.Wall(layer=layer, network=limits.network, uses_packages=job.uses_packages)
    server = isolation.server_for(wall)
    checks = [[step.as_order() for step in steps_of(check)] for check in job.checks]
    order: dict[str, Any] = {"token": token, "code": job.code, "checks": checks, "limits": asdict(limits)}
    order["locks"] = isolation.needed(server.locks)
    with (
        _pipe() as (printed, stdout),
        _pipe() as (reported, report),
        _input(job.stdin) as stdin,
        server.start(order, (stdin, stdout[0], report[0])) as control,
    ):
        for end in (stdout, report):
            os.close(end.pop())
        stopped, output, lines, words = _watch(control, printed[0], reported[0], limits)
    ending: dict[str, Any] = json.loads(words) if words else {"error": "its keeper ended without a word"}
    code: int | None = ending.get("code")
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ending["cpu_s"] > limits.cpu_s - 0.2):
        stopped = "timeout"
    return _Trace(
        stopped=ending.get("stopped") or stopped, code=code, stdout=output, report=lines, error=ending.get("error", "")
    )


@contextmanager
def _pipe() -> Generator[tuple[list[int], list[int]]]:
    """The two ends of a pipe, each in a list from which it may be taken; what is left is closed."""
    ends = tuple([handle] for handle in os.pipe())
    try:
        yield ends[0], ends[1]
    finally:
        for handle in [handle for end in ends for handle in end]:
            os.close(handle)


@contextmanager
def _input(text: str) -> Generator[int]:
    """A handle to read the text from, and from nothing else."""
    if not text:
        handle = os.open(os.devnull, os.O_RDONLY)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()
            handle = os.open(file.name, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _watch(
    control: socket.socket, printed: int, reported: int, limits: Limits
) -> tuple[Ending | None, bytes, bytes, bytes]:
    """What the program printed and reported, what its keeper said, and why it had to be stopped, if it had to."""
    buffers = {
        printed: (bytearray(), limits.output_bytes),
        reported: (bytearray(), _REPORT_BYTES),
        control.fileno(): (bytearray(), 1 << 16),
    }
    deadline = time.monotonic() + _START_S
    stopped: Ending | None = None
    with selectors.DefaultSelector() as selector:
        for fd in buffers:
            selector.register(fd, selectors.EVENT_READ)
        while control.fileno() in selector.get_map():
            for key, _ in selector.select(None if stopped else max(0.0, deadline - time.monotonic())):
                buffer, limit = buffers[key.fd]
                chunk = os.read(key.fd, 1 << 16)
                if key.fd == reported and not buffer:  # it is ready
                    deadline = time.monotonic() + limits.wall_s
                buffer += chunk if len(buffer) <= limit else b""
                if not chunk:
                    selector.unregister(key.fd)
                elif len(buffer) > limit and stopped is None:
                    stopped = _stop(control, "output")
            if stopped is None and time.monotonic() >= deadline:
                stopped = _stop(control, "timeout")
        for fd in (printed, reported):
            if fd in selector.get_map():
                _drain(fd, *buffers[fd])
    output, report, words = (bytes(buffer) for buffer, _ in buffers.values())
    if len(output) > limits.output_bytes:
        stopped = "output"
    return stopped, output[: limits.output_bytes], report, words


def _stop(control: socket.socket, reason: Ending) -> Ending:
    """Have the keeper end the program; it still says how that went."""
    with suppress(OSError):
        control.shutdown(socket.SHUT_WR)
    return reason


def _drain(fd: int, buffer: bytearray, limit: int) -> None:
    """What is left in the pipe of a program that has ended. Nobody is waited for who still holds its other end."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError):
        while len(buffer) <= limit and (chunk := os.read(fd, 1 << 16)):
            buffer += chunk


def _lines(report: bytes, token: str) -> list[dict[str, Any]]:
    """The lines that carry the token and parse: the code in the sandbox can write into the pipe too."""
    start, lines = token.encode(), list[dict[str, Any]]()
    for line in report.split(b"\n")[:-1]:
        with suppress(ValueError, RecursionError):
            record = json.loads(line.removeprefix(start)) if line.startswith(start) else None
            if isinstance(record, dict):
                lines.append(record)
    return lines


def _unstarted(job: Job, reason: str) -> Outcome:
    detail = f"the sandbox did not start: {reason}"
    return Outcome(passed=(False,) * len(job.checks), ending="unstarted", detail=detail, stdout="")


def _outcome(job: Job, lines: list[dict[str, Any]], trace: _Trace) -> Outcome:
    checks = {line["check"]: line for line in lines if isinstance(line.get("check"), int)}
    failures = [_failure(check, checks.get(index)) for index, check in enumerate(job.checks)]
    failed = next((reason for index, reason in enumerate(failures) if reason is not None and index in checks), "")
    end = next((line for line in lines if line.get("end") in ("done", "exception", "memory")), None)
    if trace.stopped is not None:
        ending, detail = trace.stopped, f"stopped: {trace.stopped}"
    elif end is not None:
        ending, detail = end["end"], str(end.get("detail") or failed)
    else:
        ending, detail = "crash", f"ended before its report was whole (exit code {trace.code})"
    passed = tuple(reason is None for reason in failures)
    return Outcome(passed=passed, ending=ending, detail=detail, stdout=trace.stdout.decode(errors="replace"))


def _failure(check: str, line: dict[str, Any] | None) -> str | None:
    """Why a check fails, by what was reported of it; None where it holds."""
    if line is None:
        return "it was not reached"
    if line.get("failed") is not False:
        return str(line.get("detail"))
    return failure_of(steps_of(check), line.get("values"))
