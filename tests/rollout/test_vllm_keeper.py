"""What is left of a vLLM server that has ended: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kedge.rollout.vllm import keeper

_SERVER = """
import os, subprocess, sys, tempfile
from pathlib import Path
open(tempfile.mkstemp()[0], "w").close()  # as vLLM's sockets
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while not Path(sys.argv[2], "listens").exists():
    pass
Path(sys.argv[2], "folder").write_text(tempfile.gettempdir())
os.kill(os.getpid(), 9)
"""
_ENGINE = """
import signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "given back").touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1], "listens").touch()
time.sleep(60)
"""


def test_the_processes_of_a_killed_server_give_back_what_they_hold_and_its_files_go(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(keeper.__file__), sys.executable, "-c", _SERVER, _ENGINE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.read() == b"the server ended with exit code -9\n"
    assert (tmp_path / "given back").exists()
    folder = Path((tmp_path / "folder").read_text())
    assert folder.name.startswith("vllm-")
    assert not folder.exists()
