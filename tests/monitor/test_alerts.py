"""Alerts reach a server and a program on this machine, and their failures reach nobody but the run's events."""

from __future__ import annotations

import itertools
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kedge.core.errors import ConfigError
from kedge.core.protocols import Metrics
from kedge.monitor.alerts import MAX_WAITING, Alerts, AlertSettings
from kedge.testing.tracker_fakes import RecordingTracker


@dataclass
class Server:
    url: str = ""
    status: int = 200
    wait: threading.Event = field(default_factory=threading.Event)
    bodies: list[Any] = field(default_factory=list)
    types: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    fake = Server()
    fake.wait.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
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


class ThreadRecorder(RecordingTracker):
    """Records the threads that call it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def log(self, metrics: Metrics, *, step: int) -> None:
        super().log(metrics, step=step)
        self.threads.add(threading.current_thread())

    def event(self, event: Mapping[str, Any]) -> None:
        super().event(event)
        self.threads.add(threading.current_thread())


def event(level: str, code: str = "kl.negative", **evidence: Any) -> dict[str, Any]:
    return {"level": level, "code": code, "message": "KL is low", "step": 7, "evidence": evidence}


def alerts(inner: RecordingTracker, **settings: Any) -> Alerts:
    return Alerts(inner, AlertSettings.model_validate(settings), run="hh/ppo")


def test_a_webhook_gets_events_at_or_above_the_level(server: Server) -> None:
    tracker = ThreadRecorder()
    out = alerts(tracker, level="warning", webhooks=[{"url": server.url}])
    for report in (event("info", "a"), event("warning", "b", kl=-0.3, bad=math.nan), event("fatal", "c")):
        out.event(report)
    out.log({"kl/mean": 1.0}, step=8)
    out.close()
    assert [body["code"] for body in server.bodies] == ["b", "c"]
    assert server.bodies[0] == {
        "level": "warning",
        "code": "b",
        "message": "KL is low",
        "step": 7,
        "evidence": {"kl": -0.3, "bad": "nan"},
        "run": "hh/ppo",
        "text": "hh/ppo at step 7: warning: KL is low",
    }
    assert server.types == ["application/json"] * 2
    assert (tracker.codes, tracker.logged, tracker.num_closed) == (["a", "b", "c"], [(8, {"kl/mean": 1.0})], 1)


def test_a_command_gets_the_event_on_its_standard_input(tmp_path: Path) -> None:
    tracker, target = ThreadRecorder(), tmp_path / "got.json"
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"
    out = alerts(tracker, commands=[{"run": [sys.executable, "-c", script, str(target)]}])
    out.event(event("fatal"))
    out.close()
    assert json.loads(target.read_bytes())["code"] == "kl.negative"
    assert tracker.codes == ["kl.negative"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_failures_are_told_once_and_counted_at_the_end(server: Server, status: int) -> None:
    server.status = status
    tracker = ThreadRecorder()
    out = alerts(tracker, webhooks=[{"url": server.url}])
    for number in range(3):
        out.event(event("warning", str(number)))
        _until(lambda done=number: len(server.bodies) > done)
    out.close()
    assert tracker.codes.count("alerts.failed") == 1
    assert tracker.codes[-1] == "alerts.undelivered"
    assert tracker.events[-1]["evidence"] == {"count": 3}
    message = tracker.events[tracker.codes.index("alerts.failed")]["message"]
    assert str(status) in message
    assert "127.0.0.1" in message
    assert "s3cret" not in message
    assert len(server.bodies) == 3  # a redirection is not followed
    assert tracker.threads == {threading.current_thread()}


def test_a_server_that_hangs_does_not_hold_up_the_run(server: Server) -> None:
    server.wait.clear()
    tracker = ThreadRecorder()
    out = alerts(tracker, webhooks=[{"url": server.url, "timeout_s": 30}], flush_s=0.1)
    began = time.monotonic()
    out.event(event("warning"))
    out.event(event("warning"))
    assert time.monotonic() - began < 1
    out.close()
    assert time.monotonic() - began < 2
    assert tracker.codes == ["kl.negative", "kl.negative", "alerts.failed", "alerts.undelivered"]
    assert tracker.num_closed == 1
    server.wait.set()


def test_more_than_can_wait_are_counted_and_never_block(server: Server) -> None:
    server.wait.clear()
    tracker = ThreadRecorder()
    out = alerts(tracker, webhooks=[{"url": server.url}], flush_s=0)
    for number in range(MAX_WAITING + 10):
        out.event(event("warning", str(number)))
    assert "events are waiting already" in tracker.events[tracker.codes.index("alerts.failed")]["message"]
    out.close()
    server.wait.set()


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    tracker, mark = ThreadRecorder(), tmp_path / "alive"
    # The child sleeps past the time-out and would write a mark if it lived.
    inner = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(mark)!r}).touch()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    out = alerts(tracker, commands=[{"run": [sys.executable, "-c", script], "timeout_s": 0.6}])
    out.event(event("warning"))
    out.close()
    assert "killed after 0.6 s" in tracker.events[-1]["message"]
    time.sleep(1.6)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"), (["/no/such/program"], "FileNotFoundError")],
)
def test_a_command_that_fails_is_told(command: list[str], says: str) -> None:
    tracker = ThreadRecorder()
    out = alerts(tracker, commands=[{"run": command}])
    out.event(event("warning"))
    out.close()
    assert tracker.codes == ["kl.negative", "alerts.failed"]
    assert says in tracker.events[-1]["message"]


def test_a_url_may_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_HOOK", server.url)
    out = alerts(ThreadRecorder(), webhooks=[{"url_variable": "TEAM_HOOK"}])
    out.event(event("warning"))
    out.close()
    assert len(server.bodies) == 1
    monkeypatch.delenv("TEAM_HOOK")
    with pytest.raises(ConfigError, match="TEAM_HOOK holds no"):
        alerts(ThreadRecorder(), webhooks=[{"url_variable": "TEAM_HOOK"}])


def test_a_reply_that_never_ends_is_given_up_at_the_time_limit() -> None:
    """The limit is of the whole exchange: a byte now and then does not start it again."""
    listening = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def drip() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            for byte in itertools.cycle(b"HTTP/1.1 200 O"):
                if done.wait(0.05):
                    return
                with suppress(OSError):
                    connection.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    tracker = ThreadRecorder()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/hook/s3cret"
    out = alerts(tracker, webhooks=[{"url": url, "timeout_s": 0.4}], flush_s=4)
    out.event(event("warning"))
    out.close()
    done.set()
    thread.join()
    listening.close()
    assert "TimeoutError: no reply within 0.4 s" in tracker.events[-1]["message"]


def test_a_failure_says_why_without_the_url() -> None:
    tracker = ThreadRecorder()
    out = alerts(tracker, webhooks=[{"url": "http://127.0.0.1:9/hook/s3cret?token=t0ken"}])
    out.event(event("warning"))
    out.close()
    message = tracker.events[-1]["message"]
    assert "webhook 1 (127.0.0.1): ConnectionError" in message
    assert "s3cret" not in message
    assert "t0ken" not in message


@pytest.mark.parametrize("url", ["http://hooks.example/x?token=abc123", "http://me:abc123@hooks.example/x"])
def test_a_key_goes_unencrypted_to_this_machine_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match=r"would go unencrypted over http to hooks\.example"):
        AlertSettings.model_validate({"webhooks": [{"url": url}]})
    AlertSettings.model_validate({"webhooks": [{"url": url.replace("http:", "https:")}]})
    monkeypatch.setenv("TEAM_HOOK", "http://hooks.example/services/abc123")
    with pytest.raises(ConfigError, match=r"http://hooks\.example: it counts as a secret") as refused:
        alerts(ThreadRecorder(), webhooks=[{"url_variable": "TEAM_HOOK"}])
    assert "abc123" not in str(refused.value)


@pytest.mark.parametrize("webhook", [{}, {"url": "http://a/b", "url_variable": "X"}, {"url": "file:///etc/passwd"}])
def test_a_webhook_has_exactly_one_http_url(webhook: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        AlertSettings.model_validate({"webhooks": [webhook]})


def test_without_receivers_nothing_is_started() -> None:
    tracker = ThreadRecorder()
    before = threading.active_count()
    out = alerts(tracker)
    out.event(event("fatal"))
    assert threading.active_count() == before
    out.close()
    assert (tracker.codes, tracker.num_closed) == (["kl.negative"], 1)


def _until(is_so: Any) -> None:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.02)
