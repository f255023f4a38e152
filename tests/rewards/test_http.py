"""The HTTP source against a server on this machine that fails in every way it can."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.rewards.client import CallFailed, Endpoint, call
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import Source
from kedge.rewards.http import make
from kedge.rewards.settings import HttpSource

Make = Callable[..., Answer]


def source(server: Any, context: RewardContext, **changes: Any) -> Source:
    how = {"kind": "http", "url": server.url, "backoff_s": 0.001, "retries": 2, "batch": 2, "workers": 2} | changes
    return make(HttpSource.model_validate(how), context)


def lengths(body: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"scores": [len(row["answer"]) for row in body["answers"]]}).encode()


def reasons(source: Source, answers: list[Answer]) -> list[str]:
    results = source.judge(answers)
    assert all(math.isnan(result.score) for result in results)
    return [result.reason for result in results]


def test_batches_keep_their_order(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lengths
    texts = ["a", "bbb", "", "日本", "ccccc"]
    assert source(server, context).score([answer(text) for text in texts]) == [1.0, 3.0, 0.0, 2.0, 5.0]
    assert sorted(len(body["answers"]) for body in server.requests) == [1, 2, 2]


def test_what_is_sent(server: Any, context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = lengths
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    source(server, context, key_variable="REWARD_KEY").score([answer("x", "y", level=3)])
    row = {
        "prompt": [{"role": "user", "content": "Why?"}],
        "answer": "x",
        "is_finished": True,
        "solution": "y",
        "extra": {"level": 3},
    }
    assert server.requests == [{"answers": [row]}]
    assert server.sent[0]["Authorization"] == "Bearer s3cret"


def test_a_missing_key_is_said_before_anything_is_sent(server: Any, context: RewardContext) -> None:
    with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY"):
        source(server, context, key_variable="NO_SUCH_KEY")


def test_a_batch_that_fails_costs_its_own_rows(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: (503, b"") if body["answers"][0]["answer"] == "bad" else lengths(body)
    results = source(server, context).judge([answer("aa"), answer("b"), answer("bad"), answer("x"), answer("yyy")])
    assert [result.score for result in results if result.is_scored] == [2.0, 1.0, 3.0]
    assert [result.is_scored for result in results] == [True, True, False, False, True]
    assert results[2].reason == results[3].reason == f"{server.url}: HTTP 503 Service Unavailable (tried 3 times)"


def test_it_tries_again(server: Any, context: RewardContext, answer: Make) -> None:
    replies = [(500, b""), (200, b"{"), (200, b'{"scores": [4]}')]
    server.reply = lambda body: replies[len(server.requests) - 1]
    assert source(server, context).score([answer("x")]) == [4.0]
    assert len(server.requests) == 3


def test_redirections_are_not_followed(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply, server.headers = lambda body: (302, b""), {"Location": f"{server.url}/elsewhere"}
    assert reasons(source(server, context), [answer("x")]) == [f"{server.url}: HTTP 302 Found"]
    assert server.paths == ["/"]


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(Endpoint(url="http://x", timeout_s=1, retries=0, backoff_s=0, key="s3cret"))


def test_a_refusal_is_final(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: (404, b"")
    assert reasons(source(server, context), [answer("x")]) == [f"{server.url}: HTTP 404 Not Found"]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"nonsense", "unusable reply: Expecting value: line 1 column 1 (char 0)"),
        (b"[1]", 'unusable reply: expected an object with a list "scores"'),
        (b'{"scores": 1}', 'unusable reply: expected an object with a list "scores"'),
        (b'{"scores": [1, 2]}', "unusable reply: 2 scores for 1 answers"),
    ],
)
def test_replies_that_cannot_be_used(server: Any, context: RewardContext, answer: Make, reply: bytes, why: str) -> None:
    server.reply = lambda body: (200, reply)
    assert reasons(source(server, context, retries=0), [answer("x")]) == [f"{server.url}: {why} (tried 1 times)"]


def test_single_rows_without_a_score(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: (200, b'{"scores": [null, "7", true, NaN, 0.5]}')
    results = source(server, context, batch=5).judge([answer("x")] * 5)
    assert [result.reason for result in results] == [
        "the server gave no score",
        "the server's score is not a number: 7",
        "the server's score is not a number: True",
        "the server's score is not a number: nan",
        "",
    ]
    assert results[4].score == 0.5


def test_a_slow_server_is_left(server: Any, context: RewardContext, answer: Make) -> None:
    is_over = threading.Event()
    server.reply = lambda body: (200, b'{"scores": [1]}') if is_over.wait(30) else (500, b"")
    start = time.monotonic()
    assert reasons(source(server, context, timeout_s=0.2, retries=0), [answer("x")]) == [
        f"{server.url}: timed out (tried 1 times)"
    ]
    assert time.monotonic() - start < 10
    is_over.set()


def test_a_trickle_is_left() -> None:
    """Every byte comes in time, the whole never does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                    for _ in range(100):
                        connection.sendall(b" ")
                        time.sleep(0.05)
                except OSError:
                    pass  # the client has left, as it should

        thread = threading.Thread(target=trickle)
        thread.start()
        start = time.monotonic()
        with pytest.raises(CallFailed, match="timed out"):
            call(Endpoint(url=url, timeout_s=0.4, retries=0, backoff_s=0), {}, lambda reply: reply, rng=Random(0))
        assert time.monotonic() - start < 4  # the whole trickle takes 5 s
        thread.join()


def test_nobody_there(context: RewardContext, answer: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    unreachable = make(HttpSource(kind="http", url=url, retries=1, backoff_s=0.001), context)
    assert reasons(unreachable, [answer("x")]) == [f"{url}: [Errno 111] Connection refused (tried 2 times)"]


def test_waits_double_with_jitter_from_the_seed(server: Any) -> None:
    server.reply = lambda body: (500, b"")
    waits: list[float] = []
    endpoint = Endpoint(url=server.url, timeout_s=5, retries=3, backoff_s=1.0, sleep=waits.append)
    with pytest.raises(CallFailed):
        call(endpoint, {}, lambda reply: reply, rng=Random(3))
    rng = Random(3)
    assert waits == pytest.approx([2**attempt * (1 + rng.random()) / 2 for attempt in range(3)], rel=1e-12)


def test_the_server_may_ask_for_a_longer_wait(server: Any) -> None:
    server.reply, server.headers = lambda body: (429, b""), {"Retry-After": "9"}
    waits: list[float] = []
    with pytest.raises(CallFailed, match="HTTP 429"):
        call(
            Endpoint(url=server.url, timeout_s=5, retries=1, backoff_s=0.1, sleep=waits.append),
            {},
            lambda reply: reply,
            rng=Random(0),
        )
    assert waits == [9.0]


def test_facts_that_json_cannot_hold_cost_their_batch(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lengths
    results = source(server, context, batch=1).judge([answer("x", thing=object()), answer("yy")])
    assert "not JSON serializable" in results[0].reason
    assert results[1].score == 2.0
