"""Addresses of servers: which may carry a key, and how they are shown without one."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

HIDDEN = "***"

_URL = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)(?P<user>[^\s/?#\"'<>]*@)?(?P<place>[^\s?#\"'<>]*)"
    r"(?P<query>\?[^\s#\"'<>]*)?(?P<fragment>#[^\s\"'<>]*)?",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"key|token|secret|passw|pwd|auth|sig|cred|session|jwt", re.IGNORECASE)


def redacted(text: str) -> str:
    """The text with the secrets of every URL in it hidden: user and password, values of the query, the fragment.

    >>> redacted("at https://me:pw@host:8/v1?api_key=s3&v=2#x it failed")
    'at https://***@host:8/v1?api_key=***&v=***#*** it failed'
    >>> redacted("http://localhost:8000/v1: HTTP 500")
    'http://localhost:8000/v1: HTTP 500'
    """
    return _URL.sub(_without_secrets, text)


def check_url(url: str) -> str:
    """The same URL; a ValueError says what is wrong with one that cannot be called."""
    try:
        parts = urlsplit(url)
        has_place = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(f"{redacted(url)!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not has_place or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"expected http://HOST… or https://HOST…, without blanks, found {redacted(url)!r}")
    return url


def is_loopback(url: str) -> bool:
    """Whether the URL stays on this machine.

    >>> [is_loopback(f"http://{host}:80/") for host in ("localhost", "127.0.0.9", "[::1]", "10.0.0.1", "localhost.x")]
    [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def has_secret(url: str) -> bool:
    """Whether the URL itself holds what looks like a key: a user or password, or a field of the query named like one.

    >>> has_secret("https://host/v1?api-version=2"), has_secret("https://host/v1?access_token=x")
    (False, True)
    """
    parts = urlsplit(url)
    names = (field.partition("=")[0] for field in parts.query.split("&"))
    return "@" in parts.netloc or any(map(_SECRET_NAME.search, names))


def refuse_open_key(url: str, *, key: str | None) -> None:
    """A ValueError where a key (`key` says whose) would travel unencrypted to another machine, or in two ways."""
    if key and "@" in urlsplit(url).netloc:
        raise ValueError(f"the URL has a user of its own, and {key} would go there too; give one of them")
    carries = key or ("what looks like a key in the URL" if has_secret(url) else None)
    if carries and urlsplit(url).scheme == "http" and not is_loopback(url):
        raise ValueError(
            f"{carries} would go unencrypted over http to {urlsplit(url).hostname}; use https://, or a server on "
            "this machine (localhost)"
        )


def failure_reason(error: BaseException) -> str:
    """Why a call failed: what the system said, which libraries wrap in words of their own.

    >>> try:
    ...     raise RuntimeError("all attempts failed") from ConnectionRefusedError(111, "Connection refused")
    ... except RuntimeError as error:
    ...     failure_reason(error)
    '[Errno 111] Connection refused'
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.strerror:
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _without_secrets(match: re.Match[str]) -> str:
    user = f"{HIDDEN}@" if match["user"] else ""
    fields = (match["query"] or "").removeprefix("?").split("&")
    hidden = "&".join(
        f"{name}={HIDDEN}" if is_pair else HIDDEN for name, is_pair, _ in (f.partition("=") for f in fields)
    )
    query = f"?{hidden}" if match["query"] else ""
    fragment = f"#{HIDDEN}" if match["fragment"] else ""
    return f"{match['scheme']}{user}{match['place']}{query}{fragment}"
