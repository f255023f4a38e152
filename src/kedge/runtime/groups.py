"""The driver's end of groups of processes that hold roles: calls in one order, threads that ask several groups at once,
and what follows when a worker is lost, hangs, or goes another way than the others of its group.

How workers are started and reached is not known here (`kedge.runtime.ray_groups`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from kedge.core.errors import GroupLost, ProcessError, ProcessLost
from kedge.core.protocols import Phase
from kedge.runtime.local import Clock
from kedge.runtime.worker import GroupLayout, Make, Note, Reply, packed, unpacked

_GRACE_S: Final = 5.0
"""How long the other workers of a group may take to answer after one has failed."""
_STACKS_S: Final = 5.0
"""How long the driver waits for workers to write down what they do."""
_LOOK_S: Final = 0.5
_CARRIED: Final = ("KEDGE_", "HF_", "TOKENIZERS_")
"""Settings of the driver's environment that its workers have too, on whatever machine."""


class Workers(Protocol):
    """The workers of a group, wherever they are."""

    @property
    def size(self) -> int: ...
    def put(self, value: Any) -> Any:
        """A value once, for all workers."""
        ...

    def call(self, rank: int, number: int, part: str, verb: str, args: Any, carried: Any) -> tuple[Future[Reply], Any]:
        """`RoleWorker.call` of one of them, and a handle of its result; `carried` is such a handle, of any group."""
        ...

    def fetch(self, handle: Any) -> Any: ...
    def gone(self, error: BaseException) -> str | None:
        """How a worker ended, in words; None where the error is no sign of that."""
        ...

    def kill(self) -> None: ...


class Call:
    """A call that is under way."""

    def __init__(self, group: Group, futures: Sequence[Future[Reply]], handle: Any, name: str) -> None:
        self._group, self._futures, self.handle, self.name = group, futures, handle, name
        self.since = time.monotonic()

    def wait(self) -> None:
        """Until all workers have answered; raises what went wrong."""
        self._group.settle(self, self._futures)

    def result(self) -> Any:
        self.wait()
        return unpacked(self._group.workers.fetch(self.handle))


class Group:
    """The driver's end of a group. Any thread may ask; the order of calls is the same for all workers."""

    def __init__(
        self, name: str, workers: Workers, *, timeout_s: float, notes: SimpleQueue[Note], stacks: Path = Path("stacks")
    ) -> None:
        """`notes` is where the events of process 0 go, `stacks` the folder for what hanging processes are doing."""
        self.name, self.workers = name, workers
        self._timeout_s, self._notes, self._stacks = timeout_s, notes, stacks
        self._lock = threading.Lock()
        self._number = 0
        self._settled_at = 0.0
        self._busy = 0.0
        self._end: BaseException | None = None
        self.places: dict[int, tuple[str, int]] = {}
        """The machine and the number of each process, once it has answered."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kedge-{name}")

    @property
    def is_over(self) -> bool:
        return self._end is not None

    def ask(self, part: str, verb: str, *args: Any, **named: Any) -> Any:
        return self.submit(part, verb, *args, **named).result()

    def submit(self, part: str, verb: str, *args: Any, carried: Any = None, **named: Any) -> Call:
        """Begin a call. `carried`, the handle of another group's result, is its first argument."""
        if self._end is not None:
            raise self._end
        given = self.workers.put(packed((args, named)))
        with self._lock:
            calls = [
                self.workers.call(rank, self._number, part, verb, given, carried) for rank in range(self.workers.size)
            ]
            self._number += 1
        return Call(self, [future for future, _ in calls], calls[0][1], f"{part}.{verb}")

    def future(self, call: Call) -> Future[Any]:
        """The result of a call, for later."""
        return self._thread.submit(call.result)

    def take_busy(self) -> float:
        """Seconds that the group has worked since this was asked last."""
        busy, self._busy = self._busy, 0.0
        return busy

    def close(self) -> None:
        self._finish(ProcessError(f"group {self.name} has ended"))

    def settle(self, call: Call, futures: Sequence[Future[Reply]]) -> None:
        """Wait for the workers. Where they have not all gone the same way, the group is at its end."""
        replies = self._replies(call, futures)
        self._settled_at = time.monotonic()
        self.places |= {rank: (reply.host, reply.process) for rank, reply in replies.items() if reply.seconds}
        for note in replies[0].notes if 0 in replies else ():
            self._notes.put(note)
        self._busy += max(reply.seconds for reply in replies.values())
        errors = {rank: reply.error for rank, reply in sorted(replies.items()) if reply.error is not None}
        if errors:
            raise self._error(errors, is_shared=len(errors) == self.workers.size)
        first = replies[0].metrics
        for rank, reply in replies.items():
            if repr(reply.metrics) != repr(first):  # NaN is like NaN
                raise self._finish(
                    ProcessError(
                        f"group {self.name}: {call.name} gave {reply.metrics} in process {rank} and {first} in process "
                        "0: what differs between them changes the model"
                    )
                )

    def _replies(self, call: Call, futures: Sequence[Future[Reply]]) -> dict[int, Reply]:
        pending, replies, ends_at = dict(enumerate(futures)), dict[int, Reply](), float("inf")
        while pending and time.monotonic() < ends_at:
            wait(pending.values(), timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for rank in [rank for rank, future in pending.items() if future.done()]:
                replies[rank] = self._reply(rank, pending.pop(rank))
            if any(reply.error is not None for reply in replies.values()):
                ends_at = min(ends_at, time.monotonic() + _GRACE_S)
            elif self._end is not None:
                raise self._end
            elif time.monotonic() > max(call.since, self._settled_at) + self._timeout_s + _STACKS_S:
                raise self._finish(self._hang(call, list(pending)))
        return replies

    def _reply(self, rank: int, future: Future[Reply]) -> Reply:
        try:
            return future.result()
        except Exception as error:
            words = self.workers.gone(error)
            if words is None:
                raise
            host, process = self.places.get(rank, ("", 0))
            return Reply(seconds=0.0, error=GroupLost(self.name, rank, words, host), host=host, process=process)

    def _error(self, errors: Mapping[int, BaseException], *, is_shared: bool) -> BaseException:
        """What the driver raises: a lost worker before all, then an error of its own before one about others."""
        for rank, error in errors.items():
            if isinstance(error, GroupLost):
                return self._finish(error)
            if isinstance(error, ProcessLost):
                return self._finish(GroupLost(self.name, rank, str(error), self.places.get(rank, ("", 0))[0]))
        own = [error for error in errors.values() if not isinstance(error, ProcessError)]
        if own:
            return own[0] if is_shared else self._finish(own[0])
        rank, error = next(iter(errors.items()))
        return self._finish(ProcessError(f"group {self.name}: {error}"))

    def _hang(self, call: Call, ranks: Sequence[int]) -> ProcessError:
        who = " and ".join(f"process {rank}" for rank in ranks)
        return ProcessError(
            f"group {self.name}: {who} did not answer {call.name} within {self._timeout_s:g} s; what it was doing is "
            f"in {self._stacks}. Where that is no fault, raise placement.timeout; --resume goes on from the last "
            "checkpoint"
        )

    def _finish(self, error: BaseException) -> BaseException:
        """Nobody asks this group any more; gives the error."""
        if self._end is None:
            self._end = error
            self.workers.kill()
            self._thread.shutdown(wait=False)
        return error


class Start(Protocol):
    """Starts the workers of a group (`make_worker`)."""

    def __call__(self, layout: GroupLayout, stacks: Path) -> Workers: ...


class Groups:
    """The groups of a run. Those of a stage live until it is closed; one that is over is started again when it is
    opened the next time."""

    def __init__(
        self,
        layout: Mapping[str, GroupLayout],
        start: Start,
        *,
        timeout_s: float,
        restarts: int,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`end` gives back what `start` has taken."""
        self.layout = layout
        self.restarts, self.num_lost = restarts, 0
        self.notes: SimpleQueue[Note] = SimpleQueue()
        self._start, self._timeout_s, self._end_all = start, timeout_s, end
        self._open: dict[str, Group] = {}

    def open(self, names: Sequence[str], make: Make, order: Any, stacks: Path) -> dict[str, Group]:
        """These groups, built from the order where they are not there, all at the same time."""
        missing = [name for name in names if name not in self._open or self._open[name].is_over]
        for name in missing:  # one after the other: a cluster is joined with the first
            own = stacks / name
            workers = self._start(self.layout[name], own)
            self._open[name] = Group(name, workers, timeout_s=self._timeout_s, notes=self.notes, stacks=own)
        try:
            self._build([self._open[name] for name in missing], make, order)
        except BaseException:
            for name in missing:
                self._open[name].close()
            raise
        return {name: self._open[name] for name in names}

    def _build(self, groups: Sequence[Group], make: Make, order: Any) -> None:
        environment = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
        addresses = [group.submit("group", "address") for group in groups]
        building = [
            group.submit("group", "build", address.result(), os.getcwd(), environment, make, order)
            for group, address in zip(groups, addresses, strict=True)
        ]
        for call in building:
            call.wait()

    def taken_notes(self) -> Iterator[Note]:
        """The events of workers that have come since."""
        with suppress(Empty):
            while True:
                yield self.notes.get_nowait()

    def close_stage(self) -> None:
        for group in self._open.values():
            group.close()
        self._open.clear()

    def close(self) -> None:
        self.close_stage()
        self._end_all()


class ThreadedRuntime:
    """Independent questions are asked at the same time, each in a thread: groups answer them side by side."""

    def __init__(self, clock: Clock, tell: Callable[[], None] = lambda: None) -> None:
        """`tell` is called in the thread of the run after each gathering."""
        self._clock, self._tell = clock, tell
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="kedge-gather")

    def gather(self, *calls: Callable[[], Any], phase: Phase = "judge") -> list[Any]:
        with self._clock.lap("judge") if phase == "judge" else nullcontext():
            futures = [self._pool.submit(call) for call in calls]
            wait(futures)  # all: what is still asked must not come after what follows an error
        self._tell()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, GroupLost)), errors[0])
        return [future.result() for future in futures]
