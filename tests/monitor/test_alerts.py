"""Alerts reach a server and a program on this machine, and their failures reach nobody but the run's events."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kedge.core.errors import ConfigError
from kedge.core.protocols import Metrics
from kedge.monitor.alerts import MAX_WAITING, Alerts, AlertSettings


@dataclass
class Server:
    url: str = ""
    status: int = 200
    wait: threading.Event = field(default_factory=threading.Event)
    seen: list[Any] = field(default_factory=list)
    types: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    fake = Server()
    fake.wait.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.seen.append(body)
            fake.types.append(self.headers["Content-Type"])
            fake.wait.wait(5)
            self.send_response(fake.status)
            self.send_header("Location", fake.url + "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that has stopped waiting, as it should

    listening = Listening(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: listening.serve_forever(poll_interval=0.01))
    thread.start()
    fake.url = f"http://127.0.0.1:{listening.server_port}/hook/s3cret"
    yield fake
    fake.wait.set()
    listening.shutdown()
    thread.join()
    listening.server_close()


class Kept:
    """A tracker that remembers, and who called it."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.logged: list[tuple[Metrics, int]] = []
        self.closed = 0
        self.threads: set[threading.Thread] = set()

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.logged.append((metrics, step))
        self.threads.add(threading.current_thread())

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread())

    def close(self) -> None:
        self.closed += 1

    @property
    def codes(self) -> list[str]:
        return [one["code"] for one in self.events]


def event(level: str, code: str = "kl.negative", **evidence: Any) -> dict[str, Any]:
    return {"level": level, "code": code, "message": "KL is low", "step": 7, "evidence": evidence}


def alerts(kept: Kept, **settings: Any) -> Alerts:
    return Alerts(kept, AlertSettings.model_validate(settings), run="hh/ppo")


def test_a_webhook_gets_events_at_or_above_the_level(server: Server) -> None:
    kept = Kept()
    out = alerts(kept, level="warning", webhooks=[{"url": server.url}])
    for one in (event("info", "a"), event("warning", "b", kl=-0.3, bad=math.nan), event("fatal", "c")):
        out.event(one)
    out.log({"kl/mean": 1.0}, step=8)
    out.close()
    assert [one["code"] for one in server.seen] == ["b", "c"]
    assert server.seen[0] == {
        "level": "warning",
        "code": "b",
        "message": "KL is low",
        "step": 7,
        "evidence": {"kl": -0.3, "bad": "nan"},
        "run": "hh/ppo",
        "text": "hh/ppo at step 7: warning: KL is low",
    }
    assert server.types == ["application/json"] * 2
    assert (kept.codes, kept.logged, kept.closed) == (["a", "b", "c"], [({"kl/mean": 1.0}, 8)], 1)


def test_a_command_gets_the_event_on_its_standard_input(tmp_path: Path) -> None:
    kept, target = Kept(), tmp_path / "got.json"
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"
    out = alerts(kept, commands=[{"run": [sys.executable, "-c", script, str(target)]}])
    out.event(event("fatal"))
    out.close()
    assert json.loads(target.read_bytes())["code"] == "kl.negative"
    assert kept.codes == ["kl.negative"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_failures_are_told_once_and_counted_at_the_end(server: Server, status: int) -> None:
    server.status = status
    kept = Kept()
    out = alerts(kept, webhooks=[{"url": server.url}])
    for number in range(3):
        out.event(event("warning", str(number)))
        _until(lambda done=number: len(server.seen) > done)
    out.close()
    assert kept.codes.count("alerts.failed") == 1
    assert kept.codes[-1] == "alerts.undelivered"
    assert kept.events[-1]["evidence"] == {"count": 3}
    told = kept.events[kept.codes.index("alerts.failed")]["message"]
    assert str(status) in told
    assert "127.0.0.1" in told
    assert "s3cret" not in told
    assert len(server.seen) == 3  # a redirection is not followed
    assert kept.threads == {threading.current_thread()}


def test_a_server_that_hangs_does_not_hold_up_the_run(server: Server) -> None:
    server.wait.clear()
    kept = Kept()
    out = alerts(kept, webhooks=[{"url": server.url, "timeout_s": 30}], flush_s=0.1)
    began = time.monotonic()
    out.event(event("warning"))
    out.event(event("warning"))
    assert time.monotonic() - began < 1
    out.close()
    assert time.monotonic() - began < 2
    assert kept.codes == ["kl.negative", "kl.negative", "alerts.failed", "alerts.undelivered"]
    assert kept.closed == 1
    server.wait.set()


def test_more_than_can_wait_are_counted_and_never_block(server: Server) -> None:
    server.wait.clear()
    kept = Kept()
    out = alerts(kept, webhooks=[{"url": server.url}], flush_s=0)
    for number in range(MAX_WAITING + 10):
        out.event(event("warning", str(number)))
    assert "events are waiting already" in kept.events[kept.codes.index("alerts.failed")]["message"]
    out.close()
    server.wait.set()


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    kept, mark = Kept(), tmp_path / "alive"
    # The child sleeps past the time-out and would write a mark if it lived.
    inner = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(mark)!r}).touch()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    out = alerts(kept, commands=[{"run": [sys.executable, "-c", script], "timeout_s": 0.6}])
    out.event(event("warning"))
    out.close()
    assert "killed after 0.6 s" in kept.events[-1]["message"]
    time.sleep(1.6)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"), (["/no/such/program"], "FileNotFoundError")],
)
def test_a_command_that_fails_is_told(command: list[str], says: str) -> None:
    kept = Kept()
    out = alerts(kept, commands=[{"run": command}])
    out.event(event("warning"))
    out.close()
    assert kept.codes == ["kl.negative", "alerts.failed"]
    assert says in kept.events[-1]["message"]


def test_a_url_may_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_HOOK", server.url)
    out = alerts(Kept(), webhooks=[{"url_variable": "TEAM_HOOK"}])
    out.event(event("warning"))
    out.close()
    assert len(server.seen) == 1
    monkeypatch.delenv("TEAM_HOOK")
    with pytest.raises(ConfigError, match="TEAM_HOOK holds no"):
        alerts(Kept(), webhooks=[{"url_variable": "TEAM_HOOK"}])


@pytest.mark.parametrize("webhook", [{}, {"url": "http://a/b", "url_variable": "X"}, {"url": "file:///etc/passwd"}])
def test_a_webhook_has_exactly_one_http_url(webhook: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        AlertSettings.model_validate({"webhooks": [webhook]})


def test_without_receivers_nothing_is_started() -> None:
    kept = Kept()
    before = threading.active_count()
    out = alerts(kept)
    out.event(event("fatal"))
    assert threading.active_count() == before
    out.close()
    assert (kept.codes, kept.closed) == (["kl.negative"], 1)


def _until(is_so: Any) -> None:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.02)
