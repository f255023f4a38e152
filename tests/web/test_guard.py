"""Who is let in: hosts, TLS, sessions, roles, other sites, rates; and the headers of every answer."""

from __future__ import annotations

import re

import pytest
from fastapi.routing import APIRoute
from forged_requests import CASES, attempt
from team_site import HOST, ORIGIN, TOKEN, TeamSite, make_local, make_site, new_shop, pair

from kedge.core.errors import ConfigError
from kedge.label.accounts import ROLES, add_person, find_session, forget, open_session
from kedge.label.database import Store
from kedge.web.entrance import COOKIE, parse_proxies
from kedge.web.roles import MOUNTS, PUBLIC, ROUTES

PASSWORD = "correct horse battery"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_forged_request_is_refused(case) -> None:
    assert attempt(case) is None


def routes_of(site: TeamSite) -> set[tuple[str, str]]:
    return {
        (method, route.path) for route in site.app.routes if isinstance(route, APIRoute) for method in route.methods
    }


def test_every_route_is_in_the_table(site: TeamSite) -> None:
    optional = {route for route in ROUTES if route[1].startswith(("/chat", "/board"))}
    assert routes_of(site) | optional == set(ROUTES) | PUBLIC


@pytest.mark.parametrize("role", ROLES)
def test_roles_see_what_the_table_says_and_nothing_else(site: TeamSite, role) -> None:
    project = new_shop(site.store, [pair(1)])
    visitor = site.person(role, projects=[project])
    for (method, path), roles in ROUTES.items():
        if path in ("/logout", "/manage/verify") or path.startswith(("/chat", "/board")):
            continue
        answer = visitor.get(path) if method == "GET" else visitor.post(path, {"nonsense": 1})
        refused = answer.status_code == 404 and answer.json() == {"error": "there is nothing here"}
        assert refused == (role not in roles), (method, path)
        assert answer.status_code < 500
    for path in MOUNTS:
        assert visitor.get(path).status_code == 404  # nothing is hosted here


def test_who_is_not_logged_in_learns_nothing(site: TeamSite) -> None:
    anybody = site.anybody()
    for path in ("/", "/work", "/manage", "/nothing", "/docs", "/openapi.json", "/static/../x"):
        answer = anybody.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert anybody.post(path).status_code == 401


def test_logging_in_sets_a_cookie_that_only_this_host_gets(site: TeamSite) -> None:
    new_shop(site.store, [pair(1)])
    ann = add_person(site.store, "ann@example.org", "owner", password=PASSWORD)
    visitor = site.anybody()
    wrong = visitor.post("/login", {"email": "ann@example.org", "password": "wrong"})
    unknown = visitor.post("/login", {"email": "bob@example.org", "password": "wrong"})
    assert (wrong.status_code, wrong.content) == (unknown.status_code, unknown.content)
    assert wrong.status_code == 403
    answer = visitor.post("/login", {"email": "Ann@example.org", "password": PASSWORD})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    for part in ("HttpOnly", "Secure", "SameSite=strict", "Path=/"):
        assert part in cookie
    assert "domain" not in cookie.lower()
    assert find_session(site.store, cookie.partition("=")[2].partition(";")[0]) is not None
    page = visitor.client.get("/me")
    csrf = re.search(r'<meta name="csrf" content="([0-9a-f]{64})">', page.text)
    assert csrf is not None
    visitor.csrf = csrf[1]
    assert visitor.post("/logout").status_code == 200
    assert visitor.get("/me").status_code == 303
    del ann


def test_a_session_ends_after_twelve_idle_hours_and_when_a_person_is_forgotten(site: TeamSite) -> None:
    project = new_shop(site.store, [pair(1)])
    ann = site.person("annotator", projects=[project])
    for _ in range(3):
        site.clock.advance(11 * 3600)
        assert ann.get("/me").status_code == 200
    site.clock.advance(12 * 3600 + 1)
    assert ann.get("/me").status_code == 303
    bob = site.person("annotator", "bob@example.org", [project])
    forget(site.store, "bob@example.org")
    assert bob.get("/me").status_code == 303


def test_five_log_ins_a_minute_an_address(site: TeamSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.web.joining.check_password", lambda *_: None)
    visitor, other = site.anybody(), site.anybody("203.0.113.10")
    body = {"email": "ann@example.org", "password": "wrong"}
    assert [visitor.post("/login", body).status_code for _ in range(6)] == [403] * 5 + [429]
    assert visitor.post("/join", {"token": "x", "password": PASSWORD}).status_code == 429
    assert other.post("/login", body).status_code == 403
    site.clock.advance(61)
    assert visitor.post("/login", body).status_code == 403
    home = [site.anybody(f"2001:db8::{n}") for n in range(6)]
    assert [one.post("/login", body).status_code for one in home] == [403] * 5 + [429]


def test_every_answer_has_the_headers_that_keep_others_out(site: TeamSite) -> None:
    project = new_shop(site.store, [pair(1)])
    owner, anybody = site.person("owner", projects=[project]), site.anybody()
    for answer in (owner.get("/work"), owner.get("/nothing"), anybody.get("/login"), anybody.post("/login", 1)):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'nonce-")
        for part in ("form-action 'none'", "base-uri 'none'", "frame-ancestors 'none'"):
            assert part in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert "max-age" in answer.headers["strict-transport-security"]


def test_pages_have_fresh_nonces_no_inline_handlers_and_nothing_from_elsewhere(site: TeamSite) -> None:
    project = new_shop(site.store, [pair(1)])
    owner = site.person("owner", projects=[project])
    nonces = set()
    for path in ("/work", "/rank", "/me", "/review", "/manage", "/"):
        answer = owner.get(path)
        html = owner.get("/manage").text if answer.status_code == 303 else answer.text
        found = set(re.findall(r'<(?:script|style) nonce="([^"]+)">', html))
        assert len(found) == 1
        nonces |= found
        assert re.findall(r"<(?:script|style)>", html) == []
        assert re.findall(r"<[^>]+\son\w+=", html) == []
        assert re.findall(r'(?:src|href|action)="(?!/|#|data:,")[^"]*"', html) == []
        assert 'style="' not in html
        assert HOST not in html
    assert len(nonces) == 6


def test_behind_a_proxy_only_its_requests_over_tls_count(store: Store, clock) -> None:
    site = make_site(store, clock, proxies=parse_proxies(["10.0.0.0/8"]))
    add_person(store, "ann@example.org", password=None)

    def asks(peer: str, **headers: str) -> int:
        visitor = site.anybody(peer)
        visitor.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return visitor.get("/login").status_code

    assert asks("10.1.2.3", x_forwarded_proto="https", x_forwarded_for="203.0.113.1") == 200
    assert asks("10.1.2.3", x_forwarded_for="203.0.113.1") == 403
    assert asks("10.1.2.3", x_forwarded_proto="http") == 403
    assert asks("203.0.113.1", x_forwarded_proto="https", x_forwarded_for="10.1.2.3") == 403
    entrance = site.entrance
    # What the client wrote into the header itself comes first, and is not believed.
    assert entrance.peer("10.1.2.3", "1.1.1.1, 203.0.113.1", "https") == "203.0.113.1"
    assert entrance.peer("10.1.2.3", "1.1.1.1, 203.0.113.1, 10.9.9.9", "https") == "203.0.113.1"


@pytest.mark.parametrize("address", ["", "everything", "0.0.0.0/0", "::/0", "10.0.0.1/8"])
def test_a_proxy_is_an_address_and_not_everybody(address: str) -> None:
    with pytest.raises(ConfigError, match="--behind-proxy"):
        parse_proxies([address])


def test_on_this_machine_nothing_without_the_token(store: Store) -> None:
    me = make_local(store)
    for path in ("/", "/work", "/login", "/join", "/manage", "/nothing", "/docs"):
        for token in (None, "", "s3cret-toke", "S3CRET-TOKEN", "ünicode"):
            answer = me.client.get(path, params={} if token is None else {"token": token})
            assert (answer.status_code, path, token) == (403, path, token)
            assert answer.text == "Open the address that kedge label serve printed."


def test_on_this_machine_the_token_comes_by_header_and_from_our_page_alone(store: Store) -> None:
    new_shop(store, [pair(1)])
    me = make_local(store)
    assert me.post("/work/next").status_code == 200
    assert me.post("/work/next", x_kedge_token=None).status_code == 403
    assert me.post(f"/work/next?token={TOKEN}", x_kedge_token=None).status_code == 403
    assert me.post("/work/next", origin="https://evil.example").status_code == 403
    assert me.client.get("/work", params={"token": TOKEN}, headers={"host": "evil.example:8123"}).status_code == 403
    html = me.client.get("/work", params={"token": TOKEN}).text
    assert TOKEN not in html
    assert me.client.get("/login", params={"token": TOKEN}).status_code == 404
    assert ORIGIN not in html


def test_a_session_is_kept_as_a_hash(site: TeamSite) -> None:
    person = add_person(site.store, "ann@example.org")
    identity, _ = open_session(site.store, person)
    dump = site.store.read(lambda connection: str(connection.exec_driver_sql("SELECT * FROM session").all()))
    assert identity not in dump
