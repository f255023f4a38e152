"""The command line in child processes that can be killed: `kedge` itself, without the seconds that its imports take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Imports once, then one forked child a command, which does what `python -m kedge.cli` does from there on. With a
# `calls` above 0 the child kills itself at that call into what is `watched`: the system, a token of generation, a part
# of an optimiser step. How many it made goes to the file `counted`.
_FORKING = """
import itertools, json, os, signal, sys
import kedge.stages.ppo.train, kedge.stages.reward.train, kedge.stages.sft.train
import kedge.commands.check
from kedge.cli.main import main
from kedge.models.training.adamw import TorchAdamW
from kedge.models.training.train_step import TrainStep
from kedge.rollout.steps import EagerSteps

made = itertools.count(1)
system = ("open", "write", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
places = {
    "system": [(os, name) for name in system],
    "generation": [(EagerSteps, "step")],
    "update": [(TrainStep, "_accumulate"), (TorchAdamW, "publish")],
}

def count_calls(limit, watched):
    def counted(real):
        def call(*args, **kwargs):
            global last
            last = next(made)
            if last == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for owner, name in places[watched]:
        setattr(owner, name, counted(getattr(owner, name)))

print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(asked["environment"])
        last = 0
        count_calls(asked["calls"], asked["watched"])
        sys.argv = ["kedge", *asked["arguments"]]
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        with open(asked["counted"], "w") as file:
            file.write(str(last))
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Kedge:
    """Runs commands one at a time; everything they say goes to the file `output`."""

    server: subprocess.Popen[str]
    output: Path
    counted: Path

    def start(
        self,
        *arguments: object,
        calls: int = 0,
        watched: str = "system",
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Begin a command; returns its process id."""
        asked = {
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(environment or {}),
            "output": str(self.output),
            "counted": str(self.counted),
            "calls": calls,
            "watched": watched,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """The exit code of the command that was begun last; negative for a signal."""
        return int(self._line())

    def run(self, *arguments: object, calls: int = 0, watched: str = "system") -> int:
        self.start(*arguments, calls=calls, watched=watched)
        return self.wait()

    def calls(self) -> int:
        """How many calls the last command made, of those that came to their end, into what was watched."""
        return int(self.counted.read_text())

    def kill(self, process: int) -> int:
        """The exit code: that of the signal, or the command's own where it has ended before."""
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return self.wait()

    def _line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline()


@contextmanager
def forking_server(folder: Path) -> Generator[Kedge]:
    """A process that has imported everything, and forks a child a command; its files are in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", _FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    try:
        yield Kedge(server, folder / "output.txt", folder / "calls.txt")
    finally:
        server.kill()
        server.communicate()
