"""What all guards share: the way of a request through them, the headers of safe pages, and bodies read only so far."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES: Final = 1 << 20
"""Of a body, where a page says nothing else."""
TOKEN_HEADER: Final = "x-kedge-token"
CSRF_HEADER: Final = "x-csrf-token"


Refusal = Callable[[Request], Awaitable[Response | None]]
"""Why a request is not answered; None where it is."""


async def answer_guarded(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    refusal: Refusal,
    is_https: bool,
    most_bytes: int | None = MOST_BYTES,
) -> None:
    """Answer with safe headers what is not refused and not too long; `most_bytes` is None where the page itself reads a
    body piece by piece. `request.state.nonce` is what scripts and styles of the page need."""
    if scope["type"] == "lifespan":
        await app(scope, receive, send)
        return
    if scope["type"] != "http":
        return
    nonce = secrets.token_urlsafe(16)
    headers = safe_headers(nonce, is_https=is_https)

    async def send_safely(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = MutableHeaders(scope=message)
            for name, value in headers.items():
                given.setdefault(name, value)
        await send(message)

    request = Request(scope, receive)
    request.state.nonce = nonce
    if (refused := await refusal(request)) is not None:
        await refused(scope, receive, send_safely)
        return
    if most_bytes is None:
        await app(scope, receive, send_safely)
        return
    body = await limited_body(request, most_bytes)
    if body is None:
        await refusal_of(413, f"more than {most_bytes:,} bytes; send less")(scope, receive, send_safely)
        return
    await app(scope, replayed(body, receive), send_safely)


def safe_headers(nonce: str, *, is_https: bool) -> Mapping[str, str]:
    """What keeps scripts, frames and addresses of others out of a page."""
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    return headers | ({"Strict-Transport-Security": "max-age=31536000"} if is_https else {})


def refusal_of(status: int, why: str) -> Response:
    """Why a request is not answered."""
    return JSONResponse({"error": why}, status_code=status)


async def limited_body(request: Request, most: int) -> bytes | None:
    """The whole body; None where it is longer than `most` bytes."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > most:
            return None
    return bytes(received)


def replayed(body: bytes, receive: Receive) -> Receive:
    """What an application receives of a body that was read already."""
    is_sent = False

    async def again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
