"""A served model on loopback, for tests."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn

from kedge.commands.listening import listen
from kedge.commands.serve import Service, allowed_hosts
from kedge.report.live.connections import PatientProtocol
from kedge.serving.app import Door
from kedge.serving.jobs import Worker

TOKEN = "a-token-of-these-tests"
NAME = "tiny"


@dataclass(frozen=True)
class Served:
    url: str
    worker: Worker
    client: httpx2.Client

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(path, json=body)


@contextmanager
def served(service: Service, *, queue: int = 1024, most_bytes: int = 1 << 20) -> Generator[Served]:
    with closing(listen("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        worker = Worker(service.compute, rows_at_once=service.rows, most_waiting=queue)
        door = Door(name=NAME, token=TOKEN, hosts=allowed_hosts(address), worker=worker, most_bytes=most_bytes)
        config = uvicorn.Config(service.make_app(door), http=PatientProtocol, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            with httpx2.Client(base_url=f"http://{address}", headers=headers, timeout=60, trust_env=False) as client:
                yield Served(f"http://{address}", worker, client)
        finally:
            server.should_exit = True
            thread.join()
            worker.close()
