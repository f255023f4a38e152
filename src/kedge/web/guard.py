"""Before every page: host, TLS, who asks, whether they may, that no other site asks in their name, and how much.

Nothing is answered, not even "not found", to those who are not let in. Whatever is answered has the headers that keep
scripts, frames and addresses of others out.
"""

from __future__ import annotations

import secrets

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.web.entrance import COOKIE, Entrance, Visitor
from kedge.web.roles import PUBLIC, roles_for
from kedge.web.shell import CSRF_HEADER, TOKEN_HEADER, answer_guarded, refusal_of

_READS = ("GET", "HEAD")


class Guard:
    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app, self._entrance = app, entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_https = self._entrance.origin.startswith("https://")
        await answer_guarded(self._app, scope, receive, send, refusal=self._refusal, is_https=is_https)

    async def _refusal(self, request: Request) -> Response | None:
        """Why a request is not answered; None where it is, and `request.state` then knows the visitor."""
        entrance, method, path = self._entrance, request.method, request.url.path
        if request.headers.get("host", "") not in entrance.hosts:
            return refusal_of(403, "this server is not known by that name")
        request.state.peer = self._peer(request)
        if request.state.peer is None:
            return refusal_of(403, "this server is reached through its proxy and TLS alone")
        is_machine = "authorization" in request.headers
        if method not in _READS and not is_machine and not self._is_own_page(request):
            return refusal_of(403, "this was not sent by a page of ours")
        visitor = await run_in_threadpool(self._visitor, request)
        request.state.visitor = visitor
        route = ("GET" if method == "HEAD" else method, path)
        if entrance.local is None and route in PUBLIC:
            return None
        if visitor is None:
            return self._unknown(method, is_machine)
        if method not in _READS and visitor.csrf is not None:
            given = request.headers.get(CSRF_HEADER, "")
            if not secrets.compare_digest(given.encode(), visitor.csrf.encode()):
                return refusal_of(403, "the page is out of date; load it again")
        if visitor.person.role not in roles_for(*route):
            return refusal_of(404, "there is nothing here")
        return None

    def _peer(self, request: Request) -> str | None:
        address = request.client.host if request.client is not None else ""
        headers = request.headers
        return self._entrance.peer(
            address, headers.get("x-forwarded-for", ""), headers.get("x-forwarded-proto", "").strip()
        )

    def _is_own_page(self, request: Request) -> bool:
        """A page of ours says where it is from, that it sends JSON (which no form can), and where it sends it."""
        headers = request.headers
        return (
            headers.get("origin", "") == self._entrance.origin
            and headers.get("sec-fetch-site", "same-origin") == "same-origin"
            and headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        )

    def _visitor(self, request: Request) -> Visitor | None:
        # In the address for pages that are opened; what changes something sends it in a header, as no other site can.
        reads = request.method in _READS
        token = request.query_params.get("token", "") if reads else request.headers.get(TOKEN_HEADER, "")
        return self._entrance.visitor(request.headers, request.cookies.get(COOKIE), token)

    def _unknown(self, method: str, is_machine: bool) -> Response:
        if self._entrance.local is not None:
            return PlainTextResponse("Open the address that kedge label serve printed.", status_code=403)
        if method in _READS and not is_machine:
            return RedirectResponse("/login", status_code=303)
        return refusal_of(401, "you are not logged in (any more)")
