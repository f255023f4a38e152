"""Requests that another site, an outsider or a broken client would send, and what each must be answered."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from team_site import HOST, ORIGIN, Clock, TeamSite, make_site, new_shop, new_store, pair, step

from kedge.label.status import status
from kedge.web.shell import MOST_BYTES


@dataclass(frozen=True)
class Case:
    """How a good judgment is changed before it is sent; None takes a header away."""

    name: str
    status: int
    headers: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    query: str = ""
    path: str = "/work/judge"
    method: str = "POST"
    content: bytes | None = None


CASES = (
    Case("no origin", 403, {"origin": None}),
    Case("another origin", 403, {"origin": "https://evil.example"}),
    Case("null as origin", 403, {"origin": "null"}),
    Case("our origin without TLS", 403, {"origin": "http://labels.example.org"}),
    Case("our origin on another port", 403, {"origin": "https://labels.example.org:8443"}),
    Case("a name that begins like ours", 403, {"origin": "https://labels.example.org.evil.example"}),
    Case("a subdomain of ours", 403, {"origin": "https://evil.labels.example.org"}),
    Case("another site as the browser says", 403, {"sec-fetch-site": "cross-site"}),
    Case("a sibling site as the browser says", 403, {"sec-fetch-site": "same-site"}),
    Case("no CSRF token", 403, {"x-csrf-token": None}),
    Case("an empty CSRF token", 403, {"x-csrf-token": ""}),
    Case("a wrong CSRF token", 403, {"x-csrf-token": "0" * 64}),
    Case("the CSRF token in the address", 403, {"x-csrf-token": None}, query="?csrf=CSRF"),
    Case("a form", 403, {"content-type": "application/x-www-form-urlencoded"}),
    Case("a form of parts", 403, {"content-type": "multipart/form-data; boundary=x"}),
    Case("text that is JSON", 403, {"content-type": "text/plain"}),
    Case("no type", 403, {"content-type": None}),
    Case("no session", 401, {"cookie": None}),
    Case("a session that is none", 401, {"cookie": "__Host-kedge=" + "0" * 64}),
    Case("the session under another name", 401, {"cookie": "kedge=SESSION"}),
    Case("a bearer token that is none", 401, {"authorization": "Bearer " + "0" * 64}),
    Case("the session as a bearer token", 401, {"authorization": "Bearer SESSION"}),
    Case("another way to log in", 401, {"authorization": "Basic eDp5"}),
    Case("another host", 403, {"host": "evil.example"}),
    Case("our host on another port", 403, {"host": f"{HOST}:80"}),
    Case("no host", 403, {"host": ""}),
    Case("a judgment by GET", 404, method="GET"),
    Case("a judgment by PUT", 404, method="PUT"),
    Case("a judgment by DELETE", 404, method="DELETE"),
    Case("another path to it", 404, path="/work/judge/"),
    Case("a path with dots", 404, path="/work/../work/judge2"),
    Case("too much", 413, content=b'{"x": "' + b"a" * MOST_BYTES + b'"}'),
    Case("no JSON", 422, content=b"{"),
    Case("a list", 422, content=b"[]"),
    Case("nothing", 422, content=b""),
    Case("deep nesting", 400, content=b"[" * 20000),
)


_NUMBERS = count()


@cache
def _site() -> TeamSite:
    """One site for all requests, for making one takes longer than a request; it is closed when all are done."""
    opened = ExitStack()
    atexit.register(opened.close)
    clock = Clock()
    return make_site(opened.enter_context(new_store(clock)), clock)


def attempt(case: Case) -> str | None:
    """None where the request is refused as it must be, and nothing was written."""
    site, number = _site(), next(_NUMBERS)
    project = new_shop(site.store, [pair(1), pair(2)], name=f"shop{number}")
    ann = site.person("annotator", f"ann{number}@example.org", [project])
    good = {"assignment": ann.post("/work/next").json()["task"]["assignment"], "decision": step(1)}
    session = ann.headers["cookie"].partition("=")[2]
    sent: dict[str, str | None] = {
        "origin": ORIGIN,
        "content-type": "application/json",
        "x-csrf-token": ann.csrf,
        "cookie": ann.headers["cookie"],
        **{name: value and value.replace("SESSION", session) for name, value in case.headers.items()},
    }
    headers = {name: value for name, value in sent.items() if value is not None}
    body: dict[str, Any] = {"json": good} if case.content is None else {"content": case.content}
    request = ann.client.build_request(case.method, case.path + case.query.replace("CSRF", ann.csrf), **body)
    for name in ("content-type", "host"):
        if name in sent and sent[name] is None:
            request.headers.pop(name, None)
    request.headers.update(headers)
    answer = ann.client.send(request, follow_redirects=False)
    if answer.status_code != case.status:
        return f"{case.name}: answered {answer.status_code} and not {case.status}"
    if status(site.store, project).given:
        return f"{case.name}: a judgment was written"
    if ann.post("/work/judge", good).status_code != 200:
        return f"{case.name}: the good judgment is refused too"
    return None
