"""Child processes that outlive the server: runs, and models that are served for a chat.

A job is a process of its own group, a small file about it, and a file with what it writes. Whoever opens the project
next, another server or another tab, finds it there. A process is known by its number and by when it began, since
numbers come again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import write_json

JobKind = Literal["run", "serve"]
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""What each press of stop sends: save and stop; stop at once; the last resort."""
PRESS_AFTER_S: Final = 10.0
"""The next press counts after so long: saving takes a while."""
_MOST_LOG: Final = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    kind: JobKind
    subject: str
    """The recipe's file, or the model that is served."""
    name: str
    """The run's name: its folder is runs/NAME."""
    command: tuple[str, ...]
    started: float
    pid: int = 0
    born: str = ""
    """When the process began, as the system tells it."""
    is_resumed: bool = False
    presses: tuple[float, ...] = ()
    """When stop was pressed."""
    code: int | None = None
    """How it ended; None while it runs, and where nobody was there to see it."""

    @property
    def is_alive(self) -> bool:
        return self.code is None and bool(self.pid) and born_at(self.pid) == self.born

    @property
    def is_lost(self) -> bool:
        """It ended while no server was there."""
        return self.code is None and not self.is_alive


class Jobs:
    """The jobs of a project; `folder` holds a file and a log for each."""

    def __init__(self, folder: Path, *, cwd: Path) -> None:
        self.folder, self._cwd = folder, cwd
        self._lock = threading.Lock()

    def all(self, kind: JobKind | None = None) -> list[Job]:
        """The newest first."""
        found = [job for file in self.folder.glob("*.json") if (job := _read(file)) is not None]
        chosen = [job for job in found if kind is None or job.kind == kind]
        return sorted(chosen, key=lambda job: (job.started, job.id), reverse=True)

    def find(self, identity: str) -> Job:
        job = next((job for job in self.all() if job.id == identity), None)
        if job is None:
            raise DataError("there is no such run here")
        return job

    def running(self, kind: JobKind) -> list[Job]:
        return [job for job in self.all(kind) if job.is_alive]

    def start(
        self,
        kind: JobKind,
        command: Sequence[str],
        *,
        subject: str,
        name: str,
        at_once: int,
        is_resumed: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Begin a process; refused where as many as are allowed run already, also those of another server."""
        with self._alone():
            running = self.running(kind)
            if len(running) >= at_once:
                names = ", ".join(job.name for job in running)
                raise ConfigError(
                    f"{names} is running, and {at_once} may run at once here; stop it, or wait "
                    "(`kedge studio --runs-at-once N` allows more)"
                )
            if any(job.name == name for job in running):
                raise ConfigError(f"{name} is running already")
            job = Job(
                id=f"{int(time.time())}-{secrets.token_hex(4)}",
                kind=kind,
                subject=subject,
                name=name,
                command=tuple(command),
                started=time.time(),
                is_resumed=is_resumed,
            )
            self._write(job)
            process = self._begin(job, env or {})
            job = replace(job, pid=process.pid, born=born_at(process.pid) or "gone")
            self._write(job)
        threading.Thread(target=self._wait, args=(job.id, process), name=f"kedge-{job.id}", daemon=True).start()
        return job

    def stop(self, identity: str) -> str:
        """Press stop; says what was asked of the process."""
        with self._alone():
            job = self.find(identity)
            if not job.is_alive:
                return "it has ended already"
            since = time.time() - job.presses[-1] if job.presses else PRESS_AFTER_S
            if since < PRESS_AFTER_S:
                left = int(PRESS_AFTER_S - since) + 1
                return f"it was asked to save and stop; in {left} s you can ask more firmly"
            press = min(len(job.presses), len(SIGNALS) - 1)
            self._write(replace(job, presses=(*job.presses, time.time())))
            _signal(job, SIGNALS[press])
        return (
            "stopping: it finishes its step, saves and ends",
            "stopping at once; what came after the last checkpoint is done again at a resume",
            "ended by force; what came after the last checkpoint is done again at a resume",
        )[press]

    def end_now(self, identity: str) -> None:
        """End a served model: it has nothing to save."""
        job = self.find(identity)
        if job.is_alive:
            _signal(job, signal.SIGTERM)

    def log(self, job: Job, offset: int = 0) -> tuple[str, int]:
        """What it wrote from `offset` on, and where to go on; of a long log the end."""
        try:
            with self._log_file(job).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, min(offset, size), size - _MOST_LOG)
                file.seek(start)
                written = file.read(_MOST_LOG)
        except FileNotFoundError:
            return "", 0
        return written.decode(errors="replace"), start + len(written)

    def _log_file(self, job: Job) -> Path:
        return self.folder / f"{job.id}.log"

    def _begin(self, job: Job, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Without a terminal lines are plain; written at once, they can be followed.
        own = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110"}
        with self._log_file(job).open("ab") as log:
            try:
                return subprocess.Popen(
                    job.command,
                    cwd=self._cwd,
                    env={**os.environ, **own, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self._write(replace(job, code=1))
                raise DataError(f"the process could not be started: {error.strerror or error}") from error

    def _wait(self, identity: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._alone():
            self._write(replace(self.find(identity), code=code))

    def _write(self, job: Job) -> None:
        write_json(self.folder / f"{job.id}.json", asdict(job))

    @contextmanager
    def _alone(self) -> Generator[None]:
        """No other server of this project starts or stops anything meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock, (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _signal(job: Job, number: signal.Signals) -> None:
    """To all processes of a job, as a terminal does; it may end before it is told to."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, number)


def _read(file: Path) -> Job | None:
    try:
        values: dict[str, Any] = json.loads(file.read_bytes())
        values |= {name: tuple(values[name]) for name in ("command", "presses")}
        return Job(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # of another version, or damaged: it is no job that could be stopped


def born_at(pid: int) -> str | None:
    """When a process began, in the system's own words; None where there is none, or where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _born_by_ps(pid)
    # The name is in brackets, and may hold anything: state is the first word after it, the start the 20th.
    words = stat.rpartition(")")[2].split()
    return None if words[0] in ("Z", "X") else words[19]


def _born_by_ps(pid: int) -> str | None:
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, born = told.stdout.strip().partition(" ")
    return born.strip() if born and not state.startswith("Z") else None
