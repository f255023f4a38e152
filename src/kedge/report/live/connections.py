"""Connections to `kedge watch --web` and `kedge serve` that end by themselves: none is held open for nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""For a whole request, from the moment it may begin: the connection, or the end of the answer before, which must be
read by then."""
ANSWER_S = 120.0
"""For the making of an answer."""


class TimedProtocol(H11Protocol):
    """HTTP of uvicorn, which itself waits without limit for a request that has begun, or never begins."""

    answer_s: float | None = None
    """For the making of an answer; None is `ANSWER_S`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._limit: asyncio.TimerHandle | None = None
        self._answered: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._end_after(REQUEST_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._answered and not self.cycle.response_complete:  # its headers are all there
            self._answered = self.cycle
            self._end_after(self.answer_s or ANSWER_S)

    def on_response_complete(self) -> None:
        self._end_after(REQUEST_S)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._limit is not None:
            self._limit.cancel()

    def _end_after(self, seconds: float) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)


class PatientProtocol(TimedProtocol):
    """For a server whose answers are long in the making, and wait for others before them."""

    answer_s = 3600.0
