"""Processes that wait for functions to run together: made once, for as many tests as there are.

    with Pool(3) as pool:
        first, second = pool.run(function, "argument", size=2)      # function(world, "argument") in two of them

A function is one of a module, and gives something that can be pickled. One that raises ends the pool: the others may
wait for it in a meeting.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, cast

PATIENCE_S = 120.0
PRELOADED = [
    "tests.processes.sharded",
    "tests.processes.sharded_models",
    "tests.processes.sharded_state",
    "tests.processes.stages",
    "tests.processes.training",
    "kedge.runtime.processes",
]


class Pool:
    def __init__(self, size: int) -> None:
        self._number = 0
        self._folder = TemporaryDirectory(prefix="kedge-processes-")
        # A server imports everything once, and forks: a fork of this process would have its threads' locks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._lines: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
        """What each of the first `size` processes gives, by rank."""
        lines = self._lines[:size]
        assert len(lines) == size, "the pool has fewer processes, or has ended"
        self._number += 1
        store = Path(self._folder.name) / f"store-{self._number}"
        for line in lines:
            line.send((function, arguments, size, store.as_uri()))
        results: dict[int, Any] = {}
        while len(results) < size:
            waiting = [line for rank, line in enumerate(lines) if rank not in results]
            ready = wait(waiting, timeout=PATIENCE_S)
            if not ready:
                self.close()
                raise AssertionError(f"no answer from some of {size} processes within {PATIENCE_S:g} s")
            for line in cast("list[Any]", ready):
                result, error = line.recv()
                if error:
                    self.close()
                    raise AssertionError(error)
                results[lines.index(line)] = result
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._lines.clear()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        self._folder.cleanup()


def _serve(line: Connection, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from kedge.runtime.processes import ProcessWorld

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    timeout = timedelta(seconds=PATIENCE_S)
    while True:
        try:
            function, arguments, size, store = line.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
            dist.barrier()  # else one that is done at once leaves while others still connect to it
            line.send((function(ProcessWorld(), *arguments), ""))
            dist.destroy_process_group()
        except BaseException:
            line.send((None, f"process {rank} of {size}:\n{traceback.format_exc()}"))
