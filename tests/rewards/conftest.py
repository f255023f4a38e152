"""Answers to score, a context, and a server on this machine that says what a test wants."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.rewards.context import RewardContext

sys.path.insert(0, str(Path(__file__).parent))  # for the collections of cases beside the tests

Reply = tuple[int, bytes]


@dataclass
class FakeServer:
    """Answers each POST with what `reply` makes of its body; keeps what it was sent."""

    url: str = ""
    reply: Callable[[Any], Reply] = lambda body: (500, b"")
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    sent: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    connections: int = 0


class Listening(ThreadingHTTPServer):
    request_queue_size = 64  # a client that is turned away tries again a second later
    daemon_threads = True
    block_on_close = False  # clients keep their connections


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            fake.connections += 1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            fake.sent.append(dict(self.headers))
            fake.paths.append(self.path)
            status, text = fake.reply(body)
            try:
                self.send_response(status)
                for name, value in fake.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has stopped waiting, as it should

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = Listening(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: listening.serve_forever(poll_interval=0.01))
    thread.start()
    fake.url = f"http://127.0.0.1:{listening.server_port}"
    yield fake
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def context(tmp_path: Path) -> RewardContext:
    return RewardContext(folder=tmp_path, seed=7)


@pytest.fixture
def answer() -> Callable[..., Answer]:
    def make(text: str, solution: str | None = None, **extra: Any) -> Answer:
        return Answer(prompt=(("user", "Why?"),), text=text, is_finished=True, solution=solution, extra=extra)

    return make
