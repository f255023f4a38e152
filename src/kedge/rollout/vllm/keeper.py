"""Stands between Kedge and a server: when Kedge ends, in whatever way, the server and its own processes end too.

Run as a program: `python keeper.py COMMAND…`. Its standard input is a pipe that Kedge holds open; at its end the
command's process group is ended. Left of Kedge, it needs the standard library alone.

The server has a folder of its own for temporary files: vLLM leaves its sockets there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 10.0
"""What a server gets to end by itself."""
_REST_S = 1.0
"""What its own processes get then."""
_TRACKER = b"from multiprocessing.resource_tracker import main"
"""In the command line of the process of Python that gives back shared memory when all who use it are gone."""


def main(command: list[str]) -> int:
    """The exit code of the command. The keeper leads a process group that the command and its children are in."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group, of which the keeper is a part
    folder = tempfile.mkdtemp(prefix="vllm-")
    # What torch compiles is kept: the next server needs it too.
    compiled = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    environment = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": folder}
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=_hear_signals)
    threading.Thread(target=_end_with_kedge, args=(server,), daemon=True).start()
    code = server.wait()
    print(f"the server ended with exit code {code}", file=sys.stderr, flush=True)
    leads = os.getpgid(0) == os.getpid()  # started by hand, the group is somebody else's
    if leads:
        _end_rest()
    shutil.rmtree(folder, ignore_errors=True)
    if leads:
        os.killpg(0, signal.SIGKILL)  # the keeper goes with it: nothing is left to do
    return code


def _hear_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_kedge(server: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    server.terminate()
    try:
        server.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _end_rest() -> None:
    """End what the server has left behind, last the processes that clean up after the others."""
    os.killpg(0, signal.SIGTERM)
    _wait_for_rest()
    for process, command in _rest().items():
        if _TRACKER not in command:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    _wait_for_rest()


def _wait_for_rest() -> None:
    until = time.monotonic() + _REST_S
    while _rest() and time.monotonic() < until:
        time.sleep(0.05)


def _rest() -> dict[int, bytes]:
    """The command lines of the other processes of the keeper's group; those that have ended do not count."""
    rest: dict[int, bytes] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, group = (place / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpid() and state != "Z" and place.name != group:
                rest[int(place.name)] = (place / "cmdline").read_bytes()
    return rest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
