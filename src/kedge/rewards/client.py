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

_MAX_REPLY_BYTES = 16 << 20
_MAX_WAIT_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirections are refused: the key and the answers would go to a server that nobody named."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class CallFailed(Exception):
    """A call gave no usable reply; the message says why. Its rows have no score."""


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
    """The reply to `body` as `read` parses it; a ValueError of `read` means that the reply cannot be used."""
    request = _request(endpoint, body)
    reason = ""
    for attempt in range(endpoint.retries + 1):
        wait_s = endpoint.backoff_s * 2**attempt * (0.5 + rng.random() / 2)
        try:
            return read(json.loads(_fetch(request, endpoint.timeout_s)))
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code not in (408, 429) and error.code < 500:
                    raise CallFailed(f"{endpoint.url}: {reason}") from None
                wait_s = max(wait_s, _seconds(error.headers.get("Retry-After")))
        except (TimeoutError, OSError, HTTPException) as error:  # URLError is an OSError
            reason = f"{getattr(error, 'reason', None) or error or type(error).__name__}"
        except (ValueError, RecursionError) as error:
            reason = f"unusable reply: {error}"
        if attempt < endpoint.retries:
            endpoint.sleep(min(wait_s, _MAX_WAIT_S))
    raise CallFailed(f"{endpoint.url}: {reason} (tried {endpoint.retries + 1} times)")


def _request(endpoint: Endpoint, body: Any) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    return urllib.request.Request(endpoint.url, data=json.dumps(body).encode(), headers=headers, method="POST")


def _fetch(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The body of the reply. A socket's time-out starts again with every byte, so the deadline is checked here too."""
    deadline = time.monotonic() + timeout_s
    body = bytearray()
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as reply:
        while chunk := reply.read1(1 << 16):
            body += chunk
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            if len(body) > _MAX_REPLY_BYTES:
                raise ValueError(f"larger than {_MAX_REPLY_BYTES >> 20} MB")
    return bytes(body)


def _seconds(retry_after: str | None) -> float:
    """The header `Retry-After` in seconds; a date is not read."""
    return float(retry_after) if retry_after and retry_after.isdigit() else 0.0
