"""JSON over HTTP with a deadline and retries: what a slow, failing or wrong server costs is bounded.

Retried: no connection, a missed deadline, 408, 429, 5xx, and a reply that cannot be read. Not retried: other 4xx,
and redirections, which are not followed. Connections are kept from one call to the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Generic, TypeVar

import httpx2

from kedge.core.errors import ConfigError
from kedge.core.urls import HIDDEN, failure_reason, is_loopback, redacted

T = TypeVar("T")

_MAX_REPLY_BYTES = 16 << 20
_MAX_WAIT_S = 60.0


class CallFailed(Exception):
    """A call gave no usable reply; the message says why, without a key. Its rows have no score."""


class _Refused(Exception):
    """The server answered with a status that means no. `wait_s` is how long it asks to wait."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """What is sent, how the reply is read (a ValueError: it cannot be used), and the random numbers of the waits."""

    body: bytes
    """JSON."""
    read: Callable[[Any], T]
    rng: Random


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

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
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
        results = asyncio.run_coroutine_threadsafe(_call_all(self._http, self._endpoint, calls), self._loop)
        try:
            return results.result()
        except BaseException:
            results.cancel()
            raise


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, http: httpx2.AsyncClient) -> None:
    if threading.current_thread() is thread:  # collected as garbage by the loop itself, which cannot wait for itself
        threading.Thread(target=_close, args=(loop, thread, http)).start()
        return
    asyncio.run_coroutine_threadsafe(http.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _call_all(http: httpx2.AsyncClient, endpoint: Endpoint, calls: Sequence[Call[T]]) -> list[T | CallFailed]:
    free = asyncio.Semaphore(endpoint.workers)

    async def call(one: Call[T]) -> T | CallFailed:
        async with free:
            try:
                return await _call(http, endpoint, one)
            except CallFailed as error:
                return error

    return list(await asyncio.gather(*map(call, calls)))


async def _call(http: httpx2.AsyncClient, endpoint: Endpoint, call: Call[T]) -> T:
    reason = ""
    for attempt in range(endpoint.retries + 1):
        wait_s = endpoint.backoff_s * 2**attempt * (0.5 + call.rng.random() / 2)
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                reply = await _exchange(http, endpoint.url, call.body)
            return call.read(json.loads(reply))
        except _Refused as refused:
            reason = str(refused)
            if refused.is_final:
                raise _failed(endpoint, reason) from None
            wait_s = max(wait_s, refused.wait_s)
        except TimeoutError:
            reason = f"no whole reply within {endpoint.timeout_s:g} s"
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = failure_reason(error)
        except (ValueError, RecursionError) as error:
            reason = f"unusable reply: {error}"
        if attempt < endpoint.retries:
            await endpoint.sleep(min(wait_s, _MAX_WAIT_S))
    raise _failed(endpoint, f"{reason} (tried {endpoint.retries + 1} times)")


async def _exchange(http: httpx2.AsyncClient, url: str, body: bytes) -> bytes:
    received = bytearray()
    async with http.stream("POST", url, content=body) as reply:
        if not reply.is_success:
            raise _Refused(reply.status_code, reply.reason_phrase, _seconds(reply.headers.get("Retry-After")))
        async for chunk in reply.aiter_bytes():
            received += chunk
            if len(received) > _MAX_REPLY_BYTES:
                raise ValueError(f"larger than {_MAX_REPLY_BYTES >> 20} MB")
    return bytes(received)


def _failed(endpoint: Endpoint, reason: str) -> CallFailed:
    """What a server says in its reply may hold the key that it was sent."""
    text = f"{redacted(endpoint.url)}: {redacted(reason)}"
    return CallFailed(text.replace(endpoint.key, HIDDEN) if endpoint.key else text)


def _seconds(retry_after: str | None) -> float:
    """The header `Retry-After` in seconds; a date is not read."""
    return float(retry_after) if retry_after and retry_after.isdigit() else 0.0
