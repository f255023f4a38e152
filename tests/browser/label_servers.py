"""Servers of the label pages in threads: for one person on this machine, and for a team over TLS."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from kedge.commands import label_pages
from kedge.label.database import Store


@contextmanager
def running(serve: Callable[[Callable[[str], None]], None]) -> Generator[list[str]]:
    """`serve` in a thread, and what it said, until the block ends."""
    servers, said = list[uvicorn.Server](), list[str]()
    ready, start = threading.Event(), uvicorn.Server.startup

    async def startup(self: uvicorn.Server, sockets: object = None) -> None:
        await start(self, sockets)  # type: ignore[arg-type]
        servers.append(self)
        ready.set()

    uvicorn.Server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=serve, args=(said.append,))
    try:
        thread.start()
        assert ready.wait(20)
        yield said
    finally:
        uvicorn.Server.startup = start  # type: ignore[method-assign]
        servers[0].should_exit = True
        thread.join(20)
    assert not thread.is_alive()


@contextmanager
def local_pages(store: Store, hosted: label_pages.Hosted | None = None) -> Generator[str]:
    """The address for one person."""
    with running(lambda say: label_pages.serve_locally(store, port=0, say=say, hosted=hosted)) as said:
        yield said[0]


@contextmanager
def team_pages(store: Store, folder: Path) -> Generator[str]:
    """The public address of a team, with a certificate that we sign ourselves."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    team = label_pages.TeamSettings(url=f"https://localhost:{port}", tls_cert=cert, tls_key=key)
    with running(lambda say: label_pages.serve_team(store, team, port=port, say=say)):
        yield team.url
