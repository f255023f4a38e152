"""The HTTP source against a server on this machine that fails in every way it can."""

from __future__ import annotations

import gzip
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.rewards import client
from kedge.rewards.client import Call, CallFailed, Client, Endpoint
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import Source
from kedge.rewards.http import make
from kedge.rewards.settings import HttpSource, JudgeSource

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
        "the server gave nan",
        "",
    ]
    assert results[4].score == 0.5


def test_a_slow_server_is_left(server: Any, context: RewardContext, answer: Make) -> None:
    is_over = threading.Event()
    server.reply = lambda body: (200, b'{"scores": [1]}') if is_over.wait(30) else (500, b"")
    start = time.monotonic()
    assert reasons(source(server, context, timeout_s=0.2, retries=0), [answer("x")]) == [
        f"{server.url}: no whole reply within 0.2 s (tried 1 times)"
    ]
    assert time.monotonic() - start < 10
    is_over.set()


def called(endpoint: Endpoint, body: Any = None) -> Any:
    """What one call gives; a CallFailed is raised."""
    client = Client(endpoint)
    (result,) = client.call_all([Call(body=json.dumps(body or {}).encode(), read=lambda reply: reply, rng=Random(3))])
    client.close()
    if isinstance(result, CallFailed):
        raise result
    return result


@contextmanager
def raw_server(*replies: Sequence[bytes], pause_s: float = 0.05) -> Iterator[str]:
    """A server that answers its connections with these bytes, piece by piece, until the client has left."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for pieces in replies:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    with suppress(OSError):  # the client has left, as it should
                        for piece in pieces:
                            connection.sendall(piece)
                            time.sleep(pause_s)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", *[b" "] * 100],
        [b"HTTP/1.1 200 OK\r\nX-Slow: ", *[b"a"] * 100],
        [bytes([byte]) for byte in b"HTTP/1.1 200 " + b"O" * 90],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 100],
    ],
    ids=["body", "header", "status", "chunks"],
)
def test_a_trickle_is_left(pieces: list[bytes]) -> None:
    """Every byte comes in time, the whole never does."""
    with raw_server(pieces) as url:
        start = time.monotonic()
        with pytest.raises(CallFailed, match=r"no whole reply within 0\.3 s"):
            called(Endpoint(url=url, timeout_s=0.3, retries=0, backoff_s=0))
        assert time.monotonic() - start < 4  # the whole trickle takes 5 s


@pytest.mark.parametrize("encoding", [b"", b"Content-Encoding: gzip\r\n"], ids=["plain", "gzip"])
def test_a_reply_without_end_is_left(monkeypatch: pytest.MonkeyPatch, encoding: bytes) -> None:
    monkeypatch.setattr(client, "_MAX_REPLY_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (8 << 20)) if encoding else b" " * (8 << 20)
    head = b"HTTP/1.1 200 OK\r\n" + encoding + b"Connection: close\r\n\r\n"
    with (
        raw_server([head + bomb], pause_s=0) as url,
        pytest.raises(CallFailed, match="unusable reply: larger than 1 MB"),
    ):
        called(Endpoint(url=url, timeout_s=20, retries=0, backoff_s=0))


def test_nobody_there(context: RewardContext, answer: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    unreachable = make(HttpSource(kind="http", url=f"http://127.0.0.1:{port}", retries=1, backoff_s=0.001), context)
    assert reasons(unreachable, [answer("x")]) == [
        f"http://127.0.0.1:{port}: [Errno 111] Connect call failed ('127.0.0.1', {port}) (tried 2 times)"
    ]


def test_connections_are_kept(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lengths
    kept = source(server, context, batch=1, workers=2)
    for _ in range(3):
        assert kept.score([answer("x")] * 4) == [1.0] * 4
    assert (len(server.requests), server.connections) == (12, 2)


def test_waits_double_with_jitter_from_the_seed(server: Any) -> None:
    server.reply = lambda body: (500, b"")
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(CallFailed):
        called(Endpoint(url=server.url, timeout_s=5, retries=3, backoff_s=1.0, sleep=sleep))
    rng = Random(3)
    assert waits == pytest.approx([2**attempt * (1 + rng.random()) / 2 for attempt in range(3)], rel=1e-12)


def test_the_server_may_ask_for_a_longer_wait(server: Any) -> None:
    server.reply, server.headers = lambda body: (429, b""), {"Retry-After": "9"}
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(CallFailed, match="HTTP 429"):
        called(Endpoint(url=server.url, timeout_s=5, retries=1, backoff_s=0.1, sleep=sleep))
    assert waits == [9.0]


def test_facts_that_json_cannot_hold_cost_their_batch(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lengths
    results = source(server, context, batch=1).judge([answer("x", thing=object()), answer("yy")])
    assert "not JSON serializable" in results[0].reason
    assert results[1].score == 2.0


def test_a_score_without_bounds_is_none(server: Any, context: RewardContext, answer: Make) -> None:
    server.reply = lambda body: (200, b'{"scores": [1%s, 1e300, -1e999]}' % (b"0" * 400))
    assert reasons(source(server, context, batch=3), [answer("x")] * 3) == [
        "the server gave a number too large for a score",
        "the server gave 1e+300, too large for a score",
        "the server gave -inf",
    ]


@pytest.mark.parametrize("key", ["s3cret\n", "s3\ncret", "s3\x00cret", "s3cret ", "schlüssel", "\x7f"])
def test_a_key_that_no_header_can_hold_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"REWARD_KEY": key})  # the system refuses some of them by itself
    with pytest.raises(ConfigError, match=r"REWARD_KEY .* holds a line break, a blank or another") as error:
        client.key_from("REWARD_KEY", kind="http")
    assert key not in str(error.value)


def test_a_key_does_not_come_back_in_a_reason(
    server: Any, context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    server.reply = lambda body: (200, b'{"scores": [1, "s3cret"]}')
    place = f"{server.url}/?token=abc"
    (reason,) = reasons(source(server, context, url=place, retries=0, key_variable="REWARD_KEY"), [answer("x")])
    assert reason == f"{server.url}/?token=***: unusable reply: 2 scores for 1 answers (tried 1 times)"
    assert server.paths == ["/?token=abc"]
    endpoint = Endpoint(url=server.url, timeout_s=1, retries=0, backoff_s=0, key="s3cret")
    assert str(client.failed(endpoint, "you sent s3cret")) == f"{server.url}: you sent ***"


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"url": "http://reward.example", "key_variable": "K"}, True),
        ({"url": "http://10.0.0.7:8000/x", "key_variable": "K"}, True),
        ({"url": "http://localhost.example/x", "key_variable": "K"}, True),
        ({"url": "http://me:pw@reward.example"}, True),
        ({"url": "http://reward.example?api_key=1"}, True),
        ({"url": "http://reward.example?version=1"}, False),
        ({"url": "http://reward.example"}, False),
        ({"url": "https://reward.example", "key_variable": "K"}, False),
        ({"url": "http://localhost:8000", "key_variable": "K"}, False),
        ({"url": "http://[::1]:8000", "key_variable": "K"}, False),
    ],
)
@pytest.mark.parametrize("kind", [{"kind": "http"}, {"kind": "judge", "model": "m"}], ids=["http", "judge"])
def test_a_key_goes_over_https_or_stays_here(kind: dict[str, str], changes: dict[str, str], is_refused: bool) -> None:
    section = HttpSource if kind["kind"] == "http" else JudgeSource
    if not is_refused:
        section.model_validate(kind | changes)
        return
    with pytest.raises(ValidationError, match="would go unencrypted over http to"):
        section.model_validate(kind | changes)


def test_a_url_has_a_user_or_a_key() -> None:
    with pytest.raises(ValidationError, match="give one of them"):
        HttpSource(kind="http", url="https://me:pw@reward.example", key_variable="K")


def test_a_run_writes_no_secret_of_a_url_down() -> None:
    settings = HttpSource(kind="http", url="https://me:pw@host/score?api_key=s3cret")
    assert settings.url == "https://me:pw@host/score?api_key=s3cret"
    assert settings.model_dump(mode="json")["url"] == "https://***@host/score?api_key=***"


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://a b", "host", "http://x\ny"])
def test_an_address_that_cannot_be_called_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        HttpSource(kind="http", url=url)


def test_what_is_meant_for_this_machine_goes_through_no_proxy(
    server: Any, context: RewardContext, answer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    server.reply = lengths
    assert source(server, context).score([answer("abc")]) == [3.0]
