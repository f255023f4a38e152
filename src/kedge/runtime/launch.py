"""Starts the processes of one machine, a small torchrun: waits for them, passes signals on, and says how they ended.

torch's own launcher is not used: it restarts after every error, also those of the user, and kills whoever has not
ended 30 seconds after a signal, when a large model may not be saved yet. The environment is the same as that of
torchrun, so a process cannot tell the difference. Left out: several machines, which torchrun and srun are for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, Final, cast

import torch.distributed as dist

from kedge.core.errors import ProcessLost

LAUNCHED: Final = "KEDGE_LAUNCHED"
"""Set in processes that were started here: what is lost, the launcher reports."""
_PAUSE_S: Final = 0.05
_GRACE_S: Final = 30.0
"""How long the others may take to end after one has failed; they write down how the run ended."""
_INTERRUPTED: Final = 130
_LAST_WORDS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A process that was killed: from outside, by the system for want of memory, or by a fault of its own."""

    rank: int
    signal: str
    last_words: str

    def __str__(self) -> str:
        return f"process {self.rank} was lost ({self.signal})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes ended: with the exit code that one process alone would have, or with a lost one."""

    code: int
    lost: Lost | None
    is_asked: bool
    """A signal asked them to end."""
    last_words: str
    """What the process that failed wrote, where that is not on the screen already."""


def run_processes(command: Sequence[str], size: int, *, attempt: int) -> Ending:
    """Run a command in `size` processes until all have ended. Process 0 has the screen."""
    store = cast(Any, dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        processes = [
            _start(command, rank, size, port=store.port, attempt=attempt, errors=errors[rank]) for rank in range(size)
        ]
        with _signals_passed_on(processes) as signals:
            killed = _wait(processes)
        return _ending(processes, killed, signals, errors)


def _start(
    command: Sequence[str], rank: int, size: int, *, port: int, attempt: int, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // size))
    environment = {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        LAUNCHED: "1",
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if rank else None,
        stderr=errors if rank else None,
        start_new_session=True,  # Ctrl-C comes through the launcher, once
    )


@contextmanager
def _signals_passed_on(processes: Sequence[subprocess.Popen[bytes]]) -> Generator[list[int]]:
    """Within, Ctrl-C and SIGTERM go to all processes; gives the signals that came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """Until all have ended. Those that had to be killed because another one is gone are given."""
    killed, ends_at = set[int](), float("inf")
    try:
        while None in (codes := [process.poll() for process in processes]):
            if any(code is not None and code < 0 for code in codes):
                ends_at = 0.0
            elif any(code not in (None, 0, _INTERRUPTED) for code in codes):
                ends_at = min(ends_at, time.monotonic() + _GRACE_S)
            if time.monotonic() > ends_at:
                killed |= {rank for rank, process in enumerate(processes) if process.poll() is None}
                _kill(processes)
            time.sleep(_PAUSE_S)
    finally:
        _kill(processes)
    return killed


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _ending(
    processes: Sequence[subprocess.Popen[bytes]], killed: set[int], signals: Sequence[int], errors: Sequence[IO[bytes]]
) -> Ending:
    codes = [process.returncode for process in processes]
    died = [rank for rank, code in enumerate(codes) if code < 0 and rank not in killed and -code not in signals]
    if died:
        rank = died[0]
        lost = Lost(rank=rank, signal=_signal_name(-codes[rank]), last_words=_tail(errors[rank]))
        return Ending(code=1, lost=lost, is_asked=bool(signals), last_words="")
    # A process that only ends because another one did says nothing of why.
    failed = [rank for rank, code in enumerate(codes) if code not in (0, ProcessLost.exit_code) and rank not in killed]
    rank = failed[0] if failed else 0
    code = codes[rank] if codes[rank] >= 0 else 128 - codes[rank]
    is_silent = codes[0] in (0, ProcessLost.exit_code) or 0 in killed
    words = _tail(errors[rank]) if rank and is_silent else ""
    return Ending(code=code, lost=None, is_asked=bool(signals), last_words=words)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LAST_WORDS))
    return file.read().decode(errors="replace").strip()
