"""What all guards share: the headers of safe pages, refusals, and bodies that are only read so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive

MOST_BYTES: Final = 1 << 20
"""Of a body, where a page says nothing else."""
TOKEN_HEADER: Final = "x-kedge-token"
CSRF_HEADER: Final = "x-csrf-token"


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
