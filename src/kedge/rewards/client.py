"""JSON over HTTP with a deadline and retries: what a slow, failing or wrong server costs is bounded.

Retried: no connection, a missed deadline, 408, 429, 5xx, and a reply that cannot be read. Not retried: other 4xx,
and redirections, which are not followed. Connections are kept from one call to the next. Calls that cost money go
through `paid`, which stands around each attempt.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any, Generic, TypeVar

import httpx2

from kedge.core.errors import ConfigError, KedgeError
from kedge.core.urls import HIDDEN, failure_reason, is_loopback, redacted
from kedge.rewards.settings import Rate

T = TypeVar("T")

_MAX_REPLY_BYTES = 16 << 20
_MAX_WAIT_S = 60.0
_MAX_ASKED_S = 600.0
"""The longest wait that a server can ask for."""
_MINUTE = 60.0


class CallFailed(Exception):
    """A call gave no usable reply; the message says why, without a key. Its rows have no score."""


class Unreadable(CallFailed):
    """There is a reply, and it does not say what it should; it was paid for."""


class Refused(Exception):
    """The server answered with a status that means no. `wait_s` is how long it asks to wait, 0 where it does not."""

    def __init__(self, status: int, phrase: str, wait_s: float) -> None:
        super().__init__(f"HTTP {status} {phrase}".strip())
        self.is_final = status not in (408, 429) and status < 500
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    url: str
    timeout_s: float
    """For one whole exchange, from the look-up of the host to the last byte of the reply."""
    retries: int
    backoff_s: float
    workers: int = 1
    """Calls at once."""
    key: str | None = field(default=None, repr=False)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


def all_of_it(reply: Any) -> Any:
    """The reply as it is."""
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """What is sent, how the reply is read (a ValueError: it cannot be used), and the random numbers of the waits."""

    body: bytes
    """JSON."""
    read: Callable[[Any], T]
    rng: Random = field(default_factory=Random)
    keep: Callable[[Any], Any] = all_of_it
    """What of the reply is kept, and then read: JSON too; a ValueError where it is no reply (`paid`)."""
    sample: int = 0
    """Which of several replies to an equal request, where each is another one (`paid`)."""


Exchange = Callable[[bytes], Awaitable[bytes]]
"""Sends a body once and gives the reply: a `Refused`, a TimeoutError or an error of the network where there is none."""
_Attempt = Callable[[Call[Any]], Awaitable[bytes]]
Around = Callable[[Exchange, Call[Any]], Awaitable[bytes]]
"""Stands around each attempt of a call: it may wait, look at the reply, or raise a `CallFailed`."""


def key_from(variable: str | None, *, kind: str) -> str | None:
    """The key in an environment variable; it is never part of a recipe or a message."""
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not key.strip():
        raise ConfigError(f"reward '{kind}': the environment variable {variable} (key_variable) is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"reward '{kind}': the key in the environment variable {variable} (key_variable) holds a line break, a "
            "blank or another character that no key has; set it again without, e.g. "
            f"{variable}=$(tr -d '[:space:]' < FILE)"
        )
    return key


class Client:
    """The connections to one server. A loop of its own makes the calls, so that notebooks can use it too."""

    def __init__(self, endpoint: Endpoint, around: Around | None = None) -> None:
        self._endpoint = endpoint
        self._around = around
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if endpoint.key is not None:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        self._http = httpx2.AsyncClient(
            headers=headers,
            timeout=None,  # the deadline is of the whole exchange: httpx's limits start again with every byte
            follow_redirects=False,  # the key and the answers would go to a server that nobody named
            limits=httpx2.Limits(max_connections=endpoint.workers, max_keepalive_connections=endpoint.workers),
            trust_env=not is_loopback(endpoint.url),  # what is meant for this machine goes through no proxy
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="kedge-http", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _close, self._loop, thread, self._http)

    def call_all(self, calls: Sequence[Call[T]]) -> list[T | CallFailed]:
        """What each call gives, in their order; those that fail do not stop the others."""
        results = asyncio.run_coroutine_threadsafe(_call_all(self._attempt, self._endpoint, calls), self._loop)
        try:
            return results.result()
        except BaseException:
            results.cancel()
            raise

    async def _attempt(self, call: Call[Any]) -> bytes:
        if self._around is None:
            return await self._exchange(call.body)
        return await self._around(self._exchange, call)

    async def _exchange(self, body: bytes) -> bytes:
        async with asyncio.timeout(self._endpoint.timeout_s):
            return await _exchange(self._http, self._endpoint.url, body)


class Pace:
    """When calls may start: evenly spread over a minute, and not before a server's `Retry-After` is over, which holds
    for all calls and not only for the one that was told."""

    def __init__(self, rate: Rate | None, now: Callable[[], float] = time.monotonic) -> None:
        self._request_s = _MINUTE / rate.requests if rate and rate.requests else 0.0
        self._token_s = _MINUTE / rate.tokens if rate and rate.tokens else 0.0
        self._now = now
        self._requests_free = self._tokens_free = self._held_until = now()

    def next_start(self, tokens: int) -> float:
        """When a call may start, whose place is then taken.

        >>> pace = Pace(Rate(requests=60, tokens=6000), now=lambda: 0.0)
        >>> [pace.next_start(tokens) for tokens in (50, 300, 50, 50)]
        [0.0, 1.0, 4.0, 5.0]
        """
        start = max(self._now(), self._requests_free, self._tokens_free)
        self._requests_free = start + self._request_s
        self._tokens_free = start + self._token_s * tokens
        return start

    async def turn(self, tokens: int) -> None:
        """Wait until a call may start that has about so many tokens, those of its longest reply included."""
        start = self.next_start(tokens)
        while (wait_s := max(start, self._held_until) - self._now()) > 0:
            await asyncio.sleep(wait_s)

    def hold(self, seconds: float) -> None:
        """No call starts for so long."""
        self._held_until = max(self._held_until, self._now() + seconds)

    def give_back(self, tokens: int) -> None:
        """A call had so many tokens fewer than it might have had."""
        self._tokens_free -= self._token_s * tokens


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, http: httpx2.AsyncClient) -> None:
    if threading.current_thread() is thread:  # collected as garbage by the loop itself, which cannot wait for itself
        threading.Thread(target=_close, args=(loop, thread, http)).start()
        return
    asyncio.run_coroutine_threadsafe(http.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _call_all(attempt: _Attempt, endpoint: Endpoint, calls: Sequence[Call[T]]) -> list[T | CallFailed]:
    free = asyncio.Semaphore(endpoint.workers)

    async def result(call: Call[T]) -> T | CallFailed:
        async with free:
            try:
                return await _call(attempt, endpoint, call)
            except CallFailed as error:
                return error

    try:
        async with asyncio.TaskGroup() as group:  # an error of ours ends the other calls too
            tasks = [group.create_task(result(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _call(attempt: _Attempt, endpoint: Endpoint, call: Call[T]) -> T:
    reason = ""
    for number in range(endpoint.retries + 1):
        wait_s = min(endpoint.backoff_s * 2**number * (0.5 + call.rng.random() / 2), _MAX_WAIT_S)
        try:
            return call.read(json.loads(await attempt(call)))
        except Refused as refused:
            reason = str(refused)
            if refused.is_final:
                raise failed(endpoint, reason) from None
            wait_s = max(wait_s, refused.wait_s)
        except TimeoutError:
            reason = f"no whole reply within {endpoint.timeout_s:g} s"
        except KedgeError:  # a reply that cannot be kept on the disk is no fault of the server's
            raise
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = failure_reason(error)
        except (ValueError, RecursionError) as error:
            reason = f"unusable reply: {error}"
        if number < endpoint.retries:
            await endpoint.sleep(wait_s)
    raise failed(endpoint, f"{reason} (tried {endpoint.retries + 1} times)")


async def _exchange(http: httpx2.AsyncClient, url: str, body: bytes) -> bytes:
    received = bytearray()
    async with http.stream("POST", url, content=body) as reply:
        if not reply.is_success:
            raise Refused(reply.status_code, reply.reason_phrase, _seconds(reply.headers.get("Retry-After")))
        async for chunk in reply.aiter_bytes():
            received += chunk
            if len(received) > _MAX_REPLY_BYTES:
                raise ValueError(f"larger than {_MAX_REPLY_BYTES >> 20} MB")
    return bytes(received)


def failed(endpoint: Endpoint, reason: str, kind: type[CallFailed] = CallFailed) -> CallFailed:
    """What a server says in its reply may hold the key that it was sent."""
    text = f"{redacted(endpoint.url)}: {redacted(reason)}"
    return kind(text.replace(endpoint.key, HIDDEN) if endpoint.key else text)


def _seconds(retry_after: str | None, now: datetime | None = None) -> float:
    """The header `Retry-After` in seconds, from a number or from a date; 0 where it says nothing.

    >>> now = datetime(2026, 11, 2, 10, tzinfo=UTC)
    >>> _seconds("9"), _seconds("soon"), _seconds("Mon, 02 Nov 2026 10:00:30 GMT", now)
    (9.0, 0.0, 30.0)
    """
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        try:
            date = parsedate_to_datetime(retry_after or "")
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - (now or datetime.now(UTC))).total_seconds()
        except ValueError:
            return 0.0
    return min(seconds, _MAX_ASKED_S) if seconds > 0 else 0.0
