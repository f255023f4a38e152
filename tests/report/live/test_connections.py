"""The page's server against clients that say nothing, half a request, or read nothing: it leaves them, and no other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from kedge.commands import watch
from kedge.report.live import connections

BIG = b"x" * (32 << 20)


async def application(scope: dict[str, object], receive: object, send: object) -> None:
    """Answers `/` with one byte and any other path with more than sockets hold."""
    if scope["type"] != "http":
        return
    body = b"1" if scope["path"] == "/" else BIG
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": body})  # type: ignore[operator]


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=connections.TimedProtocol,
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def is_left(client: socket.socket) -> bool:
    """Whether the server ends the connection; the client would wait for ten seconds."""
    client.settimeout(10)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize(
    "half",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /"],
    ids=["nothing", "line", "header", "second"],
)
def test_a_request_that_never_ends_is_left(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    with served() as address, socket.create_connection(address) as client:
        client.sendall(half)
        assert is_left(client)


def test_a_drop_at_a_time_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    with served() as address, socket.create_connection(address) as client:
        client.settimeout(0.02)
        client.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        is_open = True
        for _ in range(500):
            try:
                client.sendall(b"a")
                is_open = client.recv(1) != b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False
            if not is_open:
                break
        assert not is_open


def test_who_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)  # the server is done once the answer waits in its buffer
    with served() as address, socket.create_connection(address) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n")
        threading.Event().wait(0.8)
        client.settimeout(10)
        received = 0
        try:
            while chunk := client.recv(1 << 20):
                received += len(chunk)
        except ConnectionError:
            pass
        assert received < len(BIG)


@pytest.mark.slow
def test_a_page_that_asks_again_and_again_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit begins anew with each answer: the connection as such may live."""
    monkeypatch.setattr(connections, "REQUEST_S", 1.0)
    with served() as address, socket.create_connection(address) as client:
        client.settimeout(10)
        for _ in range(6):
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b"\r\n\r\n1"):
                received += client.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            threading.Event().wait(0.3)


def test_the_page_of_watch_is_served_that_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served_with: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: served_with.append(server.config))
    watch.serve([], port=0, say=lambda _: None)
    assert served_with[0].http is connections.TimedProtocol
