"""Stands between Kedge and a server: when Kedge ends, in whatever way, the server and its own processes end too.

Run as a program: `python keeper.py COMMAND…`. Its standard input is a pipe that Kedge holds open; at its end the
command's process group is ended. Left of Kedge, it needs the standard library alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 10.0
"""What a server gets to end by itself."""


def main(command: list[str]) -> int:
    """The exit code of the command. The keeper leads a process group that the command and its children are in."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent to the whole group, of which the keeper is a part
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_hear_signals)
    threading.Thread(target=_end_with_kedge, args=(server,), daemon=True).start()
    code = server.wait()
    print(f"the server ended with exit code {code}", file=sys.stderr, flush=True)
    _end_group()
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


def _end_group() -> None:
    """End what the server has left behind; the keeper itself goes last."""
    if os.getpgid(0) != os.getpid():  # started by hand: the group is somebody else's
        return
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.2)
    # SIGKILL reaches the keeper too: nothing is left to do.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
