"""Processes that run `kedge` together, forked from one that has imported everything: as torchrun or srun start them.

Each may be told to do something to itself before the command starts; what a test breaks, it breaks there, or in the
reward function of its recipe.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_SERVER = """
import json, os, sys
import torch.distributed, torch
torch.set_num_threads(1)
import kedge.stages.ppo.train, kedge.stages.sft.train, kedge.recipe.runner, kedge.commands.check, kedge.commands.run
import kedge.runtime.processes, kedge.runtime.launch, kedge.models.forward.greedy
from kedge.cli.main import main

print("ready", flush=True)
for line in sys.stdin:
    children = []
    for member in json.loads(line):
        child = os.fork()
        if child == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(member[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.environ.update(member["environment"])
            os.chdir(member["folder"])
            sys.argv = ["kedge", *member["arguments"]]
            code = 0
            try:
                exec(member["before"], {})
                main()
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                import traceback
                traceback.print_exc()
                code = 99
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    print(json.dumps(children), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One process: where it is, what is set for it, and Python that it runs first."""

    folder: Path
    arguments: Sequence[object]
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    codes: list[int]
    out: list[str]
    err: list[str]


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(_end, server)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


def start(members: Sequence[Member], home: Path) -> list[int]:
    """Begin to run them; gives their process ids. What they say goes to files in `home`."""
    asked = [
        {
            "folder": str(member.folder),
            "arguments": [str(argument) for argument in member.arguments],
            "environment": dict(member.environment),
            "before": member.before,
            "out": str(home / f"out-{number}.txt"),
            "err": str(home / f"err-{number}.txt"),
        }
        for number, member in enumerate(members)
    ]
    for number in range(len(members)):
        for name in ("out", "err"):
            (home / f"{name}-{number}.txt").touch()  # one that is killed at once never opens it
    server = _server()
    assert server.stdin is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    return _answer()


def wait(count: int, home: Path) -> Ended:
    codes = _answer()
    texts = [[(home / f"{name}-{number}.txt").read_text() for number in range(count)] for name in ("out", "err")]
    return Ended(codes, *texts)


def run(members: Sequence[Member], home: Path) -> Ended:
    start(members, home)
    return wait(len(members), home)


def _answer() -> Any:
    stdout = _server().stdout
    assert stdout is not None
    return json.loads(stdout.readline())


def by_torchrun(size: int) -> list[dict[str, str]]:
    """What torchrun sets for each process."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(size)
    ]


def by_srun(size: int) -> list[dict[str, str]]:
    """What srun sets for each process of a step on this machine; a job's number decides where its processes meet."""
    job = next(number for number in range(os.getpid(), os.getpid() + 1000) if _is_free(20_000 + number % 20_000))
    return [
        {
            "SLURM_JOB_ID": str(job),
            "SLURM_NTASKS": str(size),
            "SLURM_STEP_NUM_TASKS": str(size),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        for rank in range(size)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
