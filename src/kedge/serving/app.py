"""What every served model has in common: who is let in, how much may be sent, and how a request waits for its result.

Every request needs the bearer token, and on loopback a Host header that names this address: a page elsewhere can reach
it by no name of its own. Left out: TLS, accounts.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.core.errors import KedgeError
from kedge.serving.jobs import Job, QueueFull, Worker
from kedge.serving.wire import ApiError, model_reply, models_reply

MOST_BYTES = 8 << 20
_READ_TIMES = 8
"""So many times the limit is read of a body that is too large, so that its sender gets to read why it is refused."""
_LOOK_EVERY_S = 1.0
"""How often it is looked whether a caller that waits is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The way into a served model."""

    name: str
    """What callers name as the model."""
    token: str = field(repr=False)
    hosts: Sequence[str] | None
    """Values of the Host header that are answered, with their port; None: any."""
    worker: Worker
    most_bytes: int = MOST_BYTES
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, request: Request) -> None:
        if self.hosts is not None and request.headers.get("host", "") not in self.hosts:
            raise ApiError(403, f"this server answers to {' and '.join(self.hosts)} alone", code="wrong_host")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # compared as bytes: compare_digest takes no text beyond ASCII
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), self.token.encode()):
            message = "give the token that kedge serve printed: Authorization: Bearer TOKEN"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model '{name}' does not exist here; this server has '{self.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def body(self, request: Request) -> bytes:
        received, size = bytearray(), 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self.most_bytes:
                received += chunk
            elif size > _READ_TIMES * self.most_bytes:
                break
        if size > self.most_bytes:
            message = f"the request is larger than {self.most_bytes:,} bytes; send it in parts"
            raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
        return bytes(received)

    async def computed(self, request: Request, job: Job) -> Any:
        """The result of a job; what nobody waits for any more is not computed."""
        if job.rows > self.worker.most_waiting:
            message = f"{job.rows:,} answers in one request; at most {self.worker.most_waiting:,} are taken"
            raise ApiError(400, message, code="too_many_answers")
        try:
            future = asyncio.wrap_future(self.worker.submit(job))
        except QueueFull as full:
            headers = {"Retry-After": str(full.retry_after_s)}
            raise ApiError(429, f"too much waits already ({full}); try again later", headers=headers) from None
        while not future.done():
            await asyncio.wait([future], timeout=_LOOK_EVERY_S)
            if not future.done() and await request.is_disconnected():
                job.future.cancel()
                raise ApiError(499, "the caller is gone")
        try:
            return future.result()
        except KedgeError as error:
            raise ApiError(500, str(error)) from error


def model_routes(door: Door) -> FastAPI:
    """An application with the guard, errors in OpenAI's form, and what tells of the model."""
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Guard, door=door)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _failed)

    @app.get("/v1/models")
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        return JSONResponse(models_reply(door.name, door.created))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        door.check_model(name)
        return JSONResponse(model_reply(door.name, door.created))

    @app.get("/health")
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"status": "ok", "rows_waiting": door.worker.rows_waiting})

    return app


class _Guard:
    """Nothing is answered, not even "not found", without the right host and the token."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            self._door.check(request)
        except ApiError as error:
            await _refused(request, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", **error.headers}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _refused(request, ApiError(error.status_code, message, headers=error.headers))


def _failed(request: Request, error: Exception) -> Response:
    return _refused(request, ApiError(500, f"the server failed: {type(error).__name__}"))
