"""JSON over HTTP with a deadline and retries: what a slow, failing or wrong server costs is bounded.

Retried: no connection, a missed deadline, 408, 429, 5xx, and a reply that cannot be read. Not retried: other 4xx,
and redirections, which are not followed.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from random import Random
from typing import Any, TypeVar

from kedge.core.errors import ConfigError

T = TypeVar("T")

_LARGEST = 16 << 20
_LONGEST_WAIT_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Elsewhere is not where the key and the answers were meant to go."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class CallFailed(Exception):
    """A call gave no usable reply; the text says why. The rows that it was about have no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    url: str
    timeout_s: float
    """For one whole exchange."""
    retries: int
    backoff_s: float
    key: str | None = field(default=None, repr=False)
    sleep: Callable[[float], None] = time.sleep


def key_from(variable: str | None, *, kind: str) -> str | None:
    """The key in an environment variable; it is never part of a recipe or a message."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"reward '{kind}': the environment variable {variable} (key_variable) is not set")
    return key


def call(endpoint: Endpoint, body: Any, read: Callable[[Any], T], *, rng: Random) -> T:
    """What `read` makes of the reply to `body`; a ValueError of `read` means that the reply is no good."""
    request = _request(endpoint, body)
    why = ""
    for attempt in range(endpoint.retries + 1):
        wait_s = endpoint.backoff_s * 2**attempt * (0.5 + rng.random() / 2)
        try:
            return read(json.loads(_fetch(request, endpoint.timeout_s)))
        except urllib.error.HTTPError as error:
            with error:
                why = f"HTTP {error.code} {error.reason}"
                if error.code not in (408, 429) and error.code < 500:
                    raise CallFailed(f"{endpoint.url}: {why}") from None
                wait_s = max(wait_s, _seconds(error.headers.get("Retry-After")))
        except (TimeoutError, OSError, HTTPException) as error:  # URLError is an OSError
            why = f"{getattr(error, 'reason', None) or error or type(error).__name__}"
        except (ValueError, RecursionError) as error:
            why = f"unusable reply: {error}"
        if attempt < endpoint.retries:
            endpoint.sleep(min(wait_s, _LONGEST_WAIT_S))
    raise CallFailed(f"{endpoint.url}: {why} (tried {endpoint.retries + 1} times)")


def _request(endpoint: Endpoint, body: Any) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    return urllib.request.Request(endpoint.url, data=json.dumps(body).encode(), headers=headers, method="POST")


def _fetch(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The body; the time-out of a socket starts again with every byte, so a trickle is watched here."""
    deadline = time.monotonic() + timeout_s
    parts = bytearray()
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as reply:
        while chunk := reply.read1(1 << 16):
            parts += chunk
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            if len(parts) > _LARGEST:
                raise ValueError(f"larger than {_LARGEST >> 20} MB")
    return bytes(parts)


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0
