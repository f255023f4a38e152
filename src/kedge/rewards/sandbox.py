"""Runs code that nobody has read: a child process with limits of time, memory and output, without network.

On Linux the code can start no process, signal nobody, open no socket, and touch no file but those of its own temporary
folder, which is deleted. Without seccomp and Landlock (old kernels, other processors) files of the same user are not
protected; where the network cannot be cut, nothing is run unless that is allowed. Not prevented: code that forges the
report of its own checks from inside its process. Comparing what a program prints is safe from that.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

from kedge.core.errors import ConfigError

Network = Literal["none", "allowed"]
Ending = Literal["done", "exception", "timeout", "memory", "output", "crash", "unstarted"]
"""All but the last are facts about the code; `unstarted` is one about this machine."""

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REPORT_BYTES = 1 << 20
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    wall_s: float = 10.0
    """Counted from the first line of the code, not from the start of the interpreter."""
    cpu_s: int = 10
    memory_mb: int = 512
    output_bytes: int = 1 << 16
    file_mb: int = 16
    network: Network = "none"


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
    """Run a job in a child process, which is gone when this returns."""
    token = secrets.token_hex(16)
    try:
        trace = _execute(job, limits, token)
    except OSError as error:  # no memory, no process left
        return _unstarted(job, str(error))
    lines = _lines(trace.report, token)
    if not lines:
        return _unstarted(job, trace.errors.strip() or f"no sign of life ({trace.stopped or trace.code})")
    if not lines[0]["ready"]["network"]:
        raise ConfigError(
            "this machine cannot cut a process off from the network: it allows neither user namespaces nor seccomp, so "
            "unknown code is not run. Run on Linux where one of them is allowed, or set `network: allowed` if the "
            "whole machine is a sandbox"
        )
    return _outcome(job, lines, trace)


def missing_locks(limits: Limits) -> list[str]:
    """What this machine cannot keep code from: `network`, `processes` (starting them), `files` (of the same user)."""
    token = secrets.token_hex(16)
    lines = _lines(_execute(Job(code=""), limits, token).report, token)
    return [name for name, is_locked in lines[0]["ready"].items() if not is_locked] if lines else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """What is left of a child that has ended."""

    stopped: Ending | None
    code: int
    stdout: bytes
    report: bytes
    errors: str


def _execute(job: Job, limits: Limits, token: str) -> _Trace:
    order = {"token": token, "code": job.code, "stdin": job.stdin, "checks": job.checks, "limits": asdict(limits)}
    flags = ["-I", "-B", "-X", "utf8"] + ([] if job.uses_packages else ["-S"])
    with (
        TemporaryDirectory(prefix="kedge-sandbox-", ignore_cleanup_errors=True) as folder,
        TemporaryFile() as order_file,
        TemporaryFile() as errors_file,
    ):
        order_file.write(json.dumps(order).encode())
        order_file.seek(0)
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, *flags, str(_CHILD), str(writer)],
                stdin=order_file,
                stdout=subprocess.PIPE,
                stderr=errors_file,
                cwd=folder,
                env={},
                pass_fds=(writer,),
                start_new_session=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        stopped, stdout, report = _watch(process, reader, limits)
        errors_file.seek(0)
        errors = errors_file.read(2000).decode(errors="replace")
    return _Trace(stopped=stopped, code=process.returncode, stdout=stdout, report=report, errors=errors)


def _watch(process: subprocess.Popen[bytes], reader: int, limits: Limits) -> tuple[Ending | None, bytes, bytes]:
    """What the child printed and reported, and why it had to be stopped, if it had to. It is gone afterwards."""
    assert process.stdout is not None
    printed, reported = bytearray(), bytearray()
    buffers = {process.stdout.fileno(): (printed, limits.output_bytes), reader: (reported, _REPORT_BYTES)}
    deadline = time.monotonic() + _START_S
    stopped: Ending | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for fd in buffers:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map() and stopped is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    stopped = "timeout"
                for key, _ in ready:
                    buffer, limit = buffers[key.fd]
                    chunk = os.read(key.fd, 1 << 16)
                    if key.fd == reader and not reported:  # it is ready
                        deadline = time.monotonic() + limits.wall_s
                    buffer += chunk
                    if not chunk:
                        selector.unregister(key.fd)
                    elif len(buffer) > limit:
                        stopped = "output"
        if stopped is None:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        stopped = "timeout"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(reader)
    return stopped, bytes(printed[: limits.output_bytes]), bytes(reported)


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
    passed = tuple(checks.get(index, {}).get("passed") is True for index in range(len(job.checks)))
    failed = next((str(line.get("detail")) for _, line in sorted(checks.items()) if line.get("passed") is not True), "")
    end = next((line for line in lines if line.get("end") in ("done", "exception", "memory")), None)
    stopped = "timeout" if trace.code == -signal.SIGXCPU else trace.stopped
    if stopped is not None:
        ending, detail = stopped, f"stopped: {stopped}"
    elif end is not None:
        ending, detail = end["end"], str(end.get("detail") or failed)
    else:
        ending, detail = "crash", f"ended before its report was whole (exit code {trace.code})"
    return Outcome(passed=passed, ending=ending, detail=detail, stdout=trace.stdout.decode(errors="replace"))
