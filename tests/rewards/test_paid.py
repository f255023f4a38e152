"""Calls that cost money, against a server that counts what it is paid for."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kedge.core.errors import ContractStop, DataError, RunError
from kedge.rewards.client import Call, CallFailed
from kedge.rewards.judge_protocol import chat_body, content_of
from kedge.rewards.paid import LEDGER, PaidCalls
from kedge.rewards.settings import Budget, JudgeEndpoint, Rate
from kedge.rewards.spending.tokens import Tokens

USAGE = {"prompt_tokens": 100, "completion_tokens": 10}
PRICES = {"input": 10.0, "output": 100.0}  # 0.001 + 0.001 USD a call


def endpoint(url: str, **changes: Any) -> JudgeEndpoint:
    how = {"url": f"{url}/v1", "model": "m", "backoff_s": 0.001, "retries": 1, "max_tokens": 20} | changes
    return JudgeEndpoint.model_validate(how)


def paid(server: Any, folder: Path | None, budget: Budget | None = None, rate: Rate | None = None, **how: Any) -> Any:
    ledger, note = how.pop("ledger", None), how.pop("note", lambda code, words: None)
    return PaidCalls(endpoint(server.url, **how), folder, budget=budget, rate=rate, seed=7, ledger=ledger, note=note)


def ask_for(server: Any, *texts: str, sample: int = 0) -> list[Call[str]]:
    bodies = [chat_body(endpoint(server.url), text) for text in texts]
    return [Call(body=body, read=content_of, sample=sample) for body in bodies]


def says(text: str, usage: dict[str, Any] | None = USAGE) -> tuple[int, bytes]:
    reply = {"choices": [{"message": {"content": text}}]} | ({"usage": usage} if usage else {})
    return 200, json.dumps(reply).encode()


def echo(body: Any) -> tuple[int, bytes]:
    return says(body["messages"][0]["content"].upper())


def texts(count: int) -> list[str]:
    return [f"text {number}" for number in range(count)]


def test_equal_requests_are_sent_once_and_kept_for_the_next_process(server: Any, tmp_path: Path) -> None:
    server.reply = echo
    calls = paid(server, tmp_path)
    assert calls.ask(ask_for(server, "a", "b", "a")) == ["A", "B", "A"]
    assert (calls.spent.calls, calls.spent.kept, calls.spent.prompt_tokens) == (2, 0, 200)
    again = paid(server, tmp_path)
    assert again.ask(ask_for(server, "b", "c")) == ["B", "C"]
    assert (again.spent.calls, again.spent.kept, again.spent.completion_tokens) == (3, 1, 30)
    assert len(server.requests) == 3


def test_several_samples_of_one_request_are_several_calls(server: Any, tmp_path: Path) -> None:
    server.reply = lambda body: says(str(len(server.requests)))
    calls = paid(server, tmp_path, workers=1)
    assert calls.ask([*ask_for(server, "a"), *ask_for(server, "a", sample=1), *ask_for(server, "a")]) == ["1", "2", "1"]
    assert paid(server, tmp_path).ask(ask_for(server, "a", sample=1)) == ["2"]


def test_a_changed_request_is_asked_again(server: Any, tmp_path: Path) -> None:
    server.reply = echo
    paid(server, tmp_path).ask(ask_for(server, "a"))
    warmer = endpoint(server.url, temperature=1.0)
    paid(server, tmp_path).ask([Call(body=chat_body(warmer, "a"), read=content_of)])
    assert len(server.requests) == 2


def test_a_reply_that_cannot_be_read_is_paid_once(server: Any, tmp_path: Path) -> None:
    server.reply = echo

    def refuse(reply: Any) -> str:
        raise ValueError("no verdict")

    for _ in range(2):
        (result,) = paid(server, tmp_path).ask([Call(body=ask_for(server, "a")[0].body, read=refuse)])
        assert isinstance(result, CallFailed)
        assert "unusable reply: no verdict" in str(result)
    assert len(server.requests) == 1


def test_a_reply_that_is_none_is_asked_for_again(server: Any, tmp_path: Path) -> None:
    replies = [(200, b"<html>"), (500, b""), says("x")]
    server.reply = lambda body: replies[len(server.requests) - 1]
    calls = paid(server, tmp_path, retries=2)
    assert calls.ask(ask_for(server, "a")) == ["x"]
    assert (calls.spent.calls, calls.spent.lost) == (1, 1)  # nobody knows what the page cost; the 500 cost nothing


def test_what_a_reply_does_not_say_is_estimated(server: Any, tmp_path: Path) -> None:
    server.reply = lambda body: says("x", usage=None)
    calls = paid(server, tmp_path)
    body = ask_for(server, "a" * 400)[0].body
    calls.ask(ask_for(server, "a" * 400))
    assert (calls.spent.estimated, calls.spent.prompt_tokens) == (1, -(-len(body) // 4))
    assert "1 replies do not say their tokens" in calls.spent.in_words()


def test_the_estimate_comes_before_the_first_call(server: Any, tmp_path: Path) -> None:
    server.reply = echo
    calls = paid(server, tmp_path, Budget(usd=1, **PRICES))
    calls.ask(ask_for(server, "a"))
    estimate = calls.estimate(ask_for(server, "a", "b", "b", "c"))
    assert (estimate.calls, estimate.kept, estimate.completion_tokens) == (2, 1, 40)
    prompt = sum(-(-len(call.body) // 4) for call in ask_for(server, "b", "c"))
    assert estimate.prompt_tokens == prompt
    assert estimate.usd == pytest.approx(prompt * 10e-6 + 40 * 100e-6)
    assert len(server.requests) == 1


@pytest.mark.parametrize("workers", [1, 16])
def test_the_budget_is_never_passed_and_resuming_with_a_larger_one_asks_the_rest(
    server: Any, tmp_path: Path, workers: int
) -> None:
    server.reply = echo
    calls = ask_for(server, *texts(15))
    with pytest.raises(ContractStop, match=r"budget of 0.02 USD for m: \d calls paid.*raise budget.usd") as stop:
        paid(server, tmp_path, Budget(usd=0.02, **PRICES), workers=workers).ask(calls)
    assert stop.value.exit_code == 3
    first = len(server.requests)
    assert 0.002 * first <= 0.02
    assert 0.002 * first > 0.02 - 0.002 - 0.004  # stops where the next could pass it: 150 bytes and 20 tokens
    with pytest.raises(ContractStop):  # nothing more fits, also in another process
        paid(server, tmp_path, Budget(usd=0.02, **PRICES), workers=workers).ask(calls)
    assert len(server.requests) == first
    richer = paid(server, tmp_path, Budget(usd=1, **PRICES), workers=workers)
    assert richer.ask(calls) == [text.upper() for text in texts(15)]
    assert len(server.requests) == 15
    assert richer.spent.usd == pytest.approx(15 * 0.002)
    assert (richer.spent.calls, richer.spent.kept) == (15, first)


def test_the_worst_case_of_what_is_in_flight_is_reserved(server: Any, tmp_path: Path) -> None:
    """Replies may be twenty tokens long: of sixteen workers no more are let go than the budget could pay for."""
    most, seen, lock = [0], [0], threading.Lock()

    def slow(body: Any) -> tuple[int, bytes]:
        with lock:
            seen[0] += 1
            most[0] = max(most[0], seen[0])
        time.sleep(0.05)
        with lock:
            seen[0] -= 1
        return says("x", usage={"prompt_tokens": 0, "completion_tokens": 20})

    server.reply = slow
    calls = paid(server, tmp_path, Budget(usd=0.01, input=0, output=100.0), workers=16)  # 0.002 a call
    with pytest.raises(ContractStop):
        calls.ask(ask_for(server, *texts(20)))
    assert len(server.requests) == 5
    assert most[0] <= 5


def test_a_lost_call_counts_in_the_budget(server: Any, tmp_path: Path) -> None:
    server.reply = lambda body: time.sleep(0.2) or says("late")
    calls = paid(server, tmp_path, Budget(usd=0.01, **PRICES), timeout_s=0.05, retries=0)
    (result,) = calls.ask(ask_for(server, "a"))
    assert isinstance(result, CallFailed)
    most = len(ask_for(server, "a")[0].body) * 10e-6 + 20 * 100e-6
    assert (calls.spent.lost, calls.spent.lost_usd) == (1, pytest.approx(most))
    assert calls.spent.usd == 0
    assert "1 calls without a reply may have been paid" in calls.spent.in_words()


def test_what_never_reached_a_server_costs_nothing(tmp_path: Path) -> None:
    calls = PaidCalls(endpoint("http://127.0.0.1:9"), tmp_path, budget=None, rate=None, seed=7)
    (result,) = calls.ask([Call(body=b"{}", read=content_of)])
    assert isinstance(result, CallFailed)
    assert (calls.spent.calls, calls.spent.lost) == (0, 0)


def test_all_workers_wait_when_one_is_told_to(server: Any, tmp_path: Path) -> None:
    starts: list[float] = []

    def reply(body: Any) -> tuple[int, bytes]:
        starts.append(time.monotonic())
        server.headers = {"Retry-After": "0.4"} if len(starts) == 1 else {}
        return (429, b"") if len(starts) == 1 else echo(body)

    server.reply = reply
    results = paid(server, tmp_path, rate=Rate(requests=1200), workers=8).ask(ask_for(server, *texts(8)))
    assert results == [text.upper() for text in texts(8)]
    waited = [start - starts[0] for start in starts[1:]]
    in_flight = sum(wait < 0.35 for wait in waited)  # sent before the 429 was there
    assert in_flight <= 2


def test_calls_are_spread_over_the_minute(server: Any, tmp_path: Path) -> None:
    starts: list[float] = []
    server.reply = lambda body: starts.append(time.monotonic()) or echo(body)
    paid(server, tmp_path, rate=Rate(requests=1200), workers=8).ask(ask_for(server, *texts(6)))
    assert max(starts) - min(starts) >= 5 * 0.05 - 0.03


def test_a_folder_that_cannot_keep_replies_is_refused_before_anything_is_paid(server: Any, tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="keep replies in"):
        paid(server, tmp_path / "calls", ledger=tmp_path / LEDGER).ask(ask_for(server, "a"))
    assert server.requests == []


def test_a_reply_that_cannot_be_kept_stops_everything(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = echo

    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kedge.rewards.paid.write_json", full)
    with pytest.raises(RunError, match=r"keep a reply in .*the disk is full"):
        paid(server, tmp_path, workers=1).ask(ask_for(server, *texts(5)))
    assert len(server.requests) == 1  # not retried, and no other call is paid for in vain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"usd": 40}, "no input and no output"),
        ({"usd": 40, "input": 1}, "there is no output"),
        ({"usd": 0, "input": 1, "output": 1}, "greater than 0"),
    ],
)
def test_a_budget_without_prices_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Budget.model_validate(given)


def test_a_ledger_that_was_cut_off_is_read_to_its_last_whole_line(server: Any, tmp_path: Path) -> None:
    server.reply = echo
    paid(server, tmp_path).ask(ask_for(server, "a"))
    ledger = tmp_path / LEDGER
    with ledger.open("a") as file:
        file.write('{"sent": "abc", "prom')
    calls = paid(server, tmp_path)
    assert (calls.spent.calls, calls.spent.lost) == (1, 0)
    calls.ask(ask_for(server, "b"))
    assert paid(server, tmp_path).spent.calls == 2
    ledger.write_text("nonsense\n")
    with pytest.raises(DataError, match=r"ledger.jsonl:1"):
        paid(server, tmp_path)


def test_what_was_in_flight_when_a_run_was_killed_is_told_and_counted(server: Any, tmp_path: Path) -> None:
    """Of two calls that were sent, the reply of one is kept, and only its line in the ledger is missing."""
    server.reply = echo
    paid(server, tmp_path).ask(ask_for(server, "a", "b"))
    ledger = tmp_path / LEDGER
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    sent = [line for line in lines if "sent" in line]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in sent))
    gone = next(file for file in tmp_path.rglob(f"{sent[0]['sent']}.json"))
    gone.unlink()
    notes: list[str] = []
    calls = paid(server, tmp_path, note=lambda code, words: notes.append(words))
    calls.ask(ask_for(server, "b"))
    assert (calls.spent.calls, calls.spent.lost) == (1, 1)
    assert notes == [
        "1 calls to m were in flight when the run ended: they are asked again, and the budget counts them as paid"
    ]
    calls.ask(ask_for(server, "a", "b"))
    assert len(server.requests) == 3
    assert (calls.spent.calls, calls.spent.prompt_tokens) == (2, 200)


def test_a_run_keeps_its_own_replies_where_the_cache_is_gone(server: Any, tmp_path: Path) -> None:
    server.reply = echo
    paid(server, tmp_path / "cache", ledger=tmp_path / "run.jsonl").ask(ask_for(server, "a", "b"))
    moved = paid(server, tmp_path / "another", ledger=tmp_path / "run.jsonl")
    assert moved.ask(ask_for(server, "b", "a")) == ["B", "A"]
    assert (len(server.requests), moved.spent.calls, moved.spent.kept) == (2, 2, 2)


def test_a_paid_reply_that_is_of_no_use_is_counted_and_asked_for_again(server: Any, tmp_path: Path) -> None:
    """`keep` says what is of use: a grade that is none is not kept."""
    server.reply = lambda body: says("7" if len(server.requests) == 2 else "hm")
    (call,) = ask_for(server, "a")
    calls = paid(server, tmp_path, workers=1)
    assert calls.ask([Call(body=call.body, read=float, keep=lambda reply: float(content_of(reply)))]) == [7.0]
    assert (calls.spent.calls, calls.spent.lost, calls.spent.prompt_tokens) == (2, 0, 200)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_paid
class Server: url = sys.argv[2]
test_paid.paid(Server, Path(sys.argv[3]), workers=4).ask(test_paid.ask_for(Server, *test_paid.texts(40)))
"""


def test_kill_9_pays_at_most_for_what_was_in_flight(server: Any, tmp_path: Path) -> None:
    arrived = threading.Event()

    def reply(body: Any) -> tuple[int, bytes]:
        if len(server.requests) >= 12:
            arrived.set()
        time.sleep(0.02)
        return echo(body)

    server.reply = reply
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), server.url, str(tmp_path)]
    process = subprocess.Popen(command, env=os.environ)
    assert arrived.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.05)  # what was on its way arrives
    notes: list[str] = []
    calls = paid(server, tmp_path, workers=4, note=lambda code, words: notes.append(words))
    assert calls.ask(ask_for(server, *texts(40))) == [text.upper() for text in texts(40)]
    twice = len(server.requests) - 40
    assert 0 <= twice <= 4
    assert calls.spent.lost >= twice
    assert calls.spent.calls == 40
    assert bool(notes) == bool(calls.spent.lost)


def test_tokens_add_up() -> None:
    assert sum([Tokens(prompt=1, completion=2)] * 2, start=Tokens()) == Tokens(prompt=2, completion=4)
