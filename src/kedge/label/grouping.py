"""Group commit: writers that wait for each other share one transaction, and one flush to disk.

Each writer's work has a savepoint of its own, so that an error undoes its own work alone; nobody is answered before
the commit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

_MOST = 64
"""Works in one transaction, so that the first of them does not wait for long."""

Result = TypeVar("Result")
Transact = Callable[[Callable[[Connection], None]], None]
"""Runs a function in a transaction, and commits it."""


@dataclass(slots=True)
class _Ticket:
    work: Callable[[Connection], Any]
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    wake: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class GroupCommit:
    """The queue of writers of one store."""

    _waiting: deque[_Ticket] = field(default_factory=deque[_Ticket])
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def run(self, work: Callable[[Connection], Result], transact: Transact) -> Result:
        """Do the work in the next transaction; whoever comes to its turn first does it for all who wait."""
        ticket = _Ticket(work)
        self._waiting.append(ticket)
        while not ticket.is_done:
            if self._turn.acquire(blocking=False):
                try:
                    while not ticket.is_done:
                        self._serve(transact)
                finally:
                    self._turn.release()
                # Who was told no before the release waits for this; who comes after it gets its turn at once.
                for waiting in list(self._waiting)[:1]:
                    waiting.wake.set()
            else:
                ticket.wake.wait()
                ticket.wake.clear()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _serve(self, transact: Transact) -> None:
        group = [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]
        try:
            transact(lambda connection: _work_off(connection, group))
        except BaseException as error:
            for ticket in group:
                ticket.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            for ticket in group:
                ticket.is_done = True
                ticket.wake.set()


def _work_off(connection: Connection, group: list[_Ticket]) -> None:
    if len(group) == 1:
        # The whole transaction is its own: an error undoes it.
        group[0].result = group[0].work(connection)
        return
    for ticket in group:
        ticket.error = None
        savepoint = connection.begin_nested()
        try:
            ticket.result = ticket.work(connection)
            savepoint.commit()
        except Exception as error:
            if savepoint.is_active:
                savepoint.rollback()
            if _ends_transaction(error):
                raise
            ticket.error = error


def _ends_transaction(error: Exception) -> bool:
    """Whether the whole transaction must be tried again: a lock that was lost, a connection that is gone."""
    return isinstance(error, DBAPIError) and not isinstance(error, IntegrityError)
