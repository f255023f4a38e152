"""Workers as threads of this process: everything of groups but Ray, and groups of one process each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kedge.recipe.placement import PlacementSettings, roles_of
from kedge.runtime.groups import Groups
from kedge.runtime.worker import GroupLayout, Reply, RoleWorker, make_worker

_LOADING = threading.Lock()
"""Models are not read by two threads of one process at once: transformers changes torch while it reads one."""


class Killed(Exception):
    """In the place of a process that is gone."""


class ThreadWorkers:
    """Each worker serves its calls one after the other, in a thread of its own."""

    def __init__(self, workers: list[RoleWorker], falls: list[tuple[str, str]] | None = None) -> None:
        """The process is gone at the first call of `falls`, which is taken off the list then."""
        self.size = len(workers)
        self._workers, self._falls = workers, [] if falls is None else falls
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in workers]
        self._is_gone = False

    def put(self, value: Any) -> Any:
        return value

    def call(self, rank: int, number: int, part: str, verb: str, args: Any, carried: Any) -> tuple[Future[Reply], Any]:
        reply, result = Future[Reply](), Future[Any]()

        def serve() -> None:
            if (part, verb) in self._falls:
                self._falls.remove((part, verb))
                self._is_gone = True
            if self._is_gone:
                reply.set_exception(Killed("SIGKILL"))
                return
            sent = None if carried is None else carried.result()
            with _LOADING if part == "group" else nullcontext():
                said, value = self._workers[rank].call(number, part, verb, args, sent)
            result.set_result(value)
            reply.set_result(said)

        self._threads[rank].submit(serve)
        return reply, result

    def fetch(self, handle: Any) -> Any:
        return handle.result()

    def gone(self, error: BaseException) -> str | None:
        return str(error) if isinstance(error, Killed) else None

    def kill(self) -> None:
        self._is_gone = True
        for thread in self._threads:
            thread.shutdown(wait=False)


def layout_of(groups: Mapping[str, Any]) -> dict[str, GroupLayout]:
    placement = PlacementSettings.model_validate({"groups": groups})
    assert placement.groups is not None
    roles = roles_of(placement)
    return {
        name: GroupLayout(name=name, roles=roles[name], size=group.gpus, weights=group.weights)
        for name, group in placement.groups.items()
    }


@contextmanager
def thread_groups(
    groups: Mapping[str, Any],
    *,
    falls: list[tuple[str, str]] | None = None,
    starts: list[str] | None = None,
    restarts: int = 3,
    timeout_s: float = 60.0,
) -> Iterator[Groups]:
    """Groups of a recipe. Their names go into `starts` each time that they are started."""
    names = [] if starts is None else starts

    def start(layout: GroupLayout, stacks: Path) -> ThreadWorkers:
        assert layout.size == 1, "threads of one process cannot meet"
        names.append(layout.name)
        worker = make_worker(layout, 0, on_gpu=False, timeout_s=timeout_s, stacks=stacks)
        return ThreadWorkers([worker], falls)

    opened = Groups(layout_of(groups), start, timeout_s=timeout_s, restarts=restarts)
    try:
        yield opened
    finally:
        opened.close()
