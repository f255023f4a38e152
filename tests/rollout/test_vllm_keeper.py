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
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=16)
Path(sys.argv[1], "memory").write_text(memory.name)
tracker = Path(f"/proc/{resource_tracker._resource_tracker._pid}/status")
while not int(tracker.read_text().partition("SigIgn:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1:
    pass  # it is still starting
Path(sys.argv[1], "listens").touch()
time.sleep(60)
"""


def test_of_a_killed_server_no_process_no_file_and_no_shared_memory_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(keeper.__file__), sys.executable, "-c", _SERVER, _ENGINE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.read().startswith(b"the server ended with exit code -9\n")
    memory = Path("/dev/shm", (tmp_path / "memory").read_text())
    is_left = memory.exists()
    memory.unlink(missing_ok=True)
    assert not is_left
    folder = Path((tmp_path / "folder").read_text())
    assert folder.name.startswith("vllm-")
    assert not folder.exists()
