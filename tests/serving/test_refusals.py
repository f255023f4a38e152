"""What is refused, with which status and words; and what happens under load and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from running import NAME, TOKEN, Served, served
from wrong_requests import CASES, Case, attempt

from kedge.commands.serve import Service
from kedge.core.errors import NumericsError
from kedge.serving.jobs import Job, Worker


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_requests_are_refused(case: Case, server: Served) -> None:
    assert attempt(case, server) is None


class Gate:
    """A service around another that computes nothing before it is opened, and keeps what it is asked for."""

    def __init__(self, inner: Service) -> None:
        self.inner, self.is_open, self.has_begun = inner, threading.Event(), threading.Event()
        self.batches: list[int] = []

    def service(self) -> Service:
        def compute(kind: Any, batch: Sequence[Any]) -> Sequence[Any]:
            self.batches.append(len(batch))
            self.has_begun.set()
            assert self.is_open.wait(30)
            return self.inner.compute(kind, batch)

        return Service(compute=compute, rows=8, make_app=self.inner.make_app, scores=False)


def ask(server: Served, replies: list[httpx2.Response], **fields: Any) -> threading.Thread:
    def post() -> None:
        body = {"model": NAME, "prompt": "Hi", "max_tokens": 2, "seed": 1} | fields
        replies.append(
            httpx2.post(
                f"{server.url}/v1/completions",
                json=body,
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=30,
                trust_env=False,
            )
        )

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_waits_is_computed_together_and_more_than_the_queue_is_refused(service: Service) -> None:
    gate = Gate(service)
    replies: list[httpx2.Response] = []
    with served(gate.service(), queue=3) as server:
        threads = [ask(server, replies)]
        assert gate.has_begun.wait(20)
        for number in range(3):
            threads.append(ask(server, replies, prompt=f"Number {number}"))
            until(lambda expected=number + 1: server.worker.rows_waiting == expected)
        refused = server.post("/v1/completions", model=NAME, prompt="One more", max_tokens=2)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        too_many = server.post("/v1/completions", model=NAME, prompt="x", max_tokens=2, n=4)
        assert (too_many.status_code, "at most 3" in too_many.text) == (400, True)
        gate.is_open.set()
        for thread in threads:
            thread.join()
    assert [reply.status_code for reply in replies] == [200] * 4
    assert gate.batches == [1, 3]


def test_the_end_of_the_server_waits_for_what_is_being_answered(service: Service) -> None:
    gate = Gate(service)
    replies: list[httpx2.Response] = []
    with served(gate.service()) as server:
        thread = ask(server, replies)
        assert gate.has_begun.wait(20)
        threading.Timer(0.3, gate.is_open.set).start()
    thread.join()
    assert [reply.status_code for reply in replies] == [200]


def test_nothing_is_computed_for_a_caller_that_is_gone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.serving.app._LOOK_EVERY_S", 0.05)
    gate = Gate(service)
    with served(gate.service()) as server:
        thread = ask(server, [])
        assert gate.has_begun.wait(20)
        try:
            with pytest.raises(httpx2.TimeoutException):
                server.client.post("/v1/completions", json={"model": NAME, "prompt": "gone"}, timeout=0.2)
            until(lambda: server.worker.rows_waiting == 1)
            until(lambda: server.worker.rows_waiting == 0)
        finally:
            gate.is_open.set()
        thread.join()
    assert gate.batches == [1]


def test_a_failure_of_the_model_is_an_error_of_its_batch_alone(service: Service) -> None:
    def compute(kind: Any, batch: Sequence[Any]) -> Sequence[Any]:
        if "bad" in str(kind.stop):
            raise NumericsError("the weights that sampled are not finite")
        if "worse" in str(kind.stop):
            raise KeyError("a fault of ours")
        return service.compute(kind, batch)

    broken = Service(compute=compute, rows=8, make_app=service.make_app, scores=False)
    fields: dict[str, Any] = {"model": NAME, "prompt": "Hi", "max_tokens": 2}
    with served(broken) as server:
        bad, worse, good = (server.post("/v1/completions", **fields, stop=stop) for stop in ("bad", "worse", "good"))
    assert (bad.status_code, worse.status_code, good.status_code) == (500, 500, 200)
    assert bad.json()["error"]["message"] == "the weights that sampled are not finite"
    assert worse.json()["error"] == {
        "message": "the server failed: KeyError",
        "type": "server_error",
        "param": None,
        "code": None,
    }


def test_the_oldest_job_goes_first_and_only_its_kind_joins_it() -> None:
    batches: list[tuple[str, list[int]]] = []
    begun, may_go = threading.Event(), threading.Event()

    def compute(kind: str, batch: Sequence[int]) -> Sequence[int]:
        begun.set()
        may_go.wait(20)
        batches.append((kind, list(batch)))
        return [number * 10 for number in batch]

    worker = Worker(compute, rows_at_once=3, most_waiting=100)
    jobs = [Job(kind="a", rows=1, payload=0)]
    worker.submit(jobs[0])
    assert begun.wait(20)
    for number, (kind, rows) in enumerate([("b", 2), ("a", 1), ("b", 1), ("b", 1), ("a", 5)], start=1):
        jobs.append(Job(kind=kind, rows=rows, payload=number))
        worker.submit(jobs[-1])
    may_go.set()
    worker.close()
    assert batches == [("a", [0]), ("b", [1, 3]), ("a", [2]), ("b", [4]), ("a", [5])]
    assert [job.future.result() for job in jobs] == [0, 10, 20, 30, 40, 50]
