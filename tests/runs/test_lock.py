"""The lock: one writer, named to whoever comes second, gone with its process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.core.errors import RunError
from kedge.runs.lock import acquire, held_by

_HOLD = """
import sys
from pathlib import Path
from kedge.runs.lock import acquire
lock = acquire(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""

# The forked child outlives its killed parent; were the lock still shared with it, the run would stay locked.
_HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from kedge.runs.lock import acquire
lock = acquire(Path(sys.argv[1]))
orphan = os.fork()
if orphan == 0:
    os.close(1); os.close(2)
    time.sleep(30)
    os._exit(0)
print(orphan, flush=True)
sys.stdin.read()
"""

Start = Callable[..., "subprocess.Popen[str]"]


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_second_process_is_told_who_holds_the_lock(tmp_path: Path, start: Start) -> None:
    child = start(_HOLD, tmp_path)
    assert _line(child) == "locked"

    with pytest.raises(
        RunError, match=rf"being written by process {child.pid} on .+ since 20\d\d-.*wait until it ends"
    ):
        acquire(tmp_path)
    assert f"process {child.pid}" in (held_by(tmp_path) or "")

    child.communicate("")  # the end of its input ends it
    acquire(tmp_path).release()


def test_kill_9_frees_the_lock(tmp_path: Path, start: Start) -> None:
    child = start(_HOLD, tmp_path)
    assert _line(child) == "locked"
    child.send_signal(signal.SIGKILL)
    child.wait()

    assert held_by(tmp_path) is None
    lock = acquire(tmp_path)
    assert f"process {os.getpid()}" in (held_by(tmp_path) or "")
    lock.release()


def test_an_orphan_of_a_killed_writer_does_not_keep_the_lock(tmp_path: Path, start: Start) -> None:
    child = start(_HOLD_AND_FORK, tmp_path)
    orphan = int(_line(child))
    try:
        child.send_signal(signal.SIGKILL)
        child.wait()
        acquire(tmp_path).release()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_the_same_process_cannot_write_twice_either(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    with pytest.raises(RunError, match=f"process {os.getpid()} "):
        acquire(tmp_path)
    lock.release()
    lock.release()  # again does no harm

    assert held_by(tmp_path) is None


def test_asking_changes_nothing(tmp_path: Path) -> None:
    assert held_by(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_holder_that_has_not_yet_said_who_it_is(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    (tmp_path / ".lock").write_text("")

    assert held_by(tmp_path) == "another process (which has not yet said who it is)"
    lock.release()


def test_a_place_without_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot lock"):
        acquire(tmp_path / "file")
