"""A bounded queue in front of one worker thread, which computes jobs of a kind together.

The oldest job decides what is computed next; the others of its kind that wait join it, up to a number of rows.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


class QueueFull(Exception):
    """So many rows wait that no more are taken; `retry_after_s` is how long the last batch took."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} rows wait already")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    kind: Any
    """Jobs of an equal kind may be computed together."""
    rows: int
    payload: Any
    future: Future[Any] = field(default_factory=Future[Any])


class Worker:
    """`compute(kind, payloads)` gives a result for each payload; an error of it is that of every job in the batch."""

    def __init__(
        self, compute: Callable[[Any, Sequence[Any]], Sequence[Any]], *, rows_at_once: int, most_waiting: int
    ) -> None:
        self._compute, self._rows_at_once, self.most_waiting = compute, rows_at_once, most_waiting
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._last_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kedge-serving", daemon=True)
        self._thread.start()

    @property
    def rows_waiting(self) -> int:
        with self._changed:
            return self._count()

    def submit(self, job: Job) -> Future[Any]:
        """A job of more rows than may wait is taken by an empty queue."""
        with self._changed:
            waiting = self._count()
            if waiting and waiting + job.rows > self.most_waiting:
                raise QueueFull(waiting, max(1, math.ceil(self._last_s)))
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def _count(self) -> int:
        """Rows that wait, without those that nobody waits for any more."""
        return sum(job.rows for job in self._waiting if not job.future.cancelled())

    def close(self) -> None:
        """Compute what waits, then end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            batch = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if not batch:
                continue
            begun = time.monotonic()
            try:
                results = self._compute(batch[0].kind, [job.payload for job in batch])
                for job, result in zip(batch, results, strict=True):
                    job.future.set_result(result)
            except Exception as error:  # whatever it is, callers wait for an answer
                for job in batch:
                    if not job.future.done():
                        job.future.set_exception(error)
            self._last_s = time.monotonic() - begun

    def _next(self) -> list[Job] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            kind, rows = self._waiting[0].kind, 0
            batch: list[Job] = []
            others: deque[Job] = deque()
            for job in self._waiting:
                if job.kind == kind and (not batch or rows + job.rows <= self._rows_at_once):
                    batch.append(job)
                    rows += job.rows
                else:
                    others.append(job)
            self._waiting = others
            return batch
