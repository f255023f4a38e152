"""Before every page of the studio: the host, the token of the address, and that no other site asks in its name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.web.shell import MOST_BYTES, TOKEN_HEADER, answer_guarded, refusal_of

UPLOAD = "/upload"
_READS = ("GET", "HEAD")
_EDITOR_BYTES = 4 * MOST_BYTES
"""A recipe of a megabyte in JSON, where every letter may be written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDoor:
    """Where the studio is, and the token that its address has."""

    token: str = field(repr=False)
    origin: str
    hosts: Sequence[str]

    def is_known(self, token: str) -> bool:
        # compared as bytes: compare_digest takes no text beyond ASCII
        return secrets.compare_digest(token.encode(errors="surrogatepass"), self.token.encode())


class StudioGuard:
    def __init__(self, app: ASGIApp, door: LocalDoor) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_upload = scope.get("path") == UPLOAD  # read piece by piece, with a limit of its own
        most = None if is_upload else _EDITOR_BYTES
        await answer_guarded(self._app, scope, receive, send, refusal=self._refusal, is_https=False, most_bytes=most)

    async def _refusal(self, request: Request) -> Response | None:
        """Why a request is not answered, not even with "not found"; None where it is."""
        door, method, headers = self._door, request.method, request.headers
        if headers.get("host", "") not in door.hosts:
            return refusal_of(403, "this server is not known by that name")
        if method not in _READS and not self._is_own_page(request):
            return refusal_of(403, "this was not sent by a page of ours")
        # In the address for pages that are opened; what changes something sends it in a header, as no other site can.
        reads = method in _READS
        token = request.query_params.get("token", "") if reads else headers.get(TOKEN_HEADER, "")
        if not door.is_known(token):
            return PlainTextResponse("Open the address that kedge studio printed.", status_code=403)
        return None

    def _is_own_page(self, request: Request) -> bool:
        """A page of ours says where it is from, and sends what no form can."""
        headers = request.headers
        wanted = "application/octet-stream" if request.url.path == UPLOAD else "application/json"
        return (
            headers.get("origin", "") == self._door.origin
            and headers.get("sec-fetch-site", "same-origin") == "same-origin"
            and headers.get("content-type", "").partition(";")[0].strip().lower() == wanted
        )
