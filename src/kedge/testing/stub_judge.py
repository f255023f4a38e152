"""A judge with biases that are known, behind OpenAI's API on this machine: what measures judges must find them again.

    with StubJudge(position=0.2, garbage=0.05) as judge:
        settings = PairwiseJudge(kind="judge", url=judge.url, model="stub")
        ...
        assert max(judge.paid.values()) == 1

It compares what a request shows as answers A and B between fences (`kedge.rewards.judge_protocol`). Every draw is a
hash of the request: the same request has the same reply, whenever and in whatever order it comes.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Truth = Callable[[str, str, str], float]
"""From the conversation and the answers A and B: above 0 where A is better, below 0 where B is, 0 a tie."""
_MARK = re.compile(r"\[\[[0-9a-f]{32}\]\]")
_WORTH = re.compile(r"\(worth (-?\d+)\)")
_GARBAGE = "Both have their merits, and I would rather not say."
_CHARACTERS = 100


def by_worth(prompt: str, a: str, b: str) -> float:
    """The truth in answers that say what they are worth; others are as good as each other.

    >>> by_worth("", "Yes. (worth 3)", "No. (worth 5)"), by_worth("", "Yes.", "No. (worth 5)")
    (-2.0, 0.0)
    """
    worths = [_WORTH.search(text) for text in (a, b)]
    return float(worths[0][1]) - float(worths[1][1]) if worths[0] and worths[1] else 0.0


class StubJudge:
    """A server that judges. Entering it starts it; `url` is then for `PairwiseJudge`.

    `position` is P(A) − ½ over both orders: a share of 2 × position of all verdicts is A unseen (below 0: B).
    `length` is the log-odds by which 100 characters more win, `strength` those of the truth; where that is infinite,
    the others are never weighed. `garbage` is the share of replies that name no winner, `too_many` that of requests
    that get 429 with `Retry-After: retry_after` the first time. From call `crash_at` on, connections are closed without
    a reply, until `revive`. With `logprobs` replies have log-probabilities where they are asked for. An answer in which
    the pattern `obeys` is found wins, whatever else it says. `on_call` is given the number of a call before its reply.
    """

    def __init__(
        self,
        *,
        truth: Truth = by_worth,
        strength: float = math.inf,
        position: float = 0.0,
        length: float = 0.0,
        garbage: float = 0.0,
        too_many: float = 0.0,
        retry_after: int = 0,
        crash_at: int | None = None,
        logprobs: bool = False,
        obeys: str | None = None,
        on_call: Callable[[int], None] | None = None,
        seed: int = 0,
    ) -> None:
        self.truth, self.strength, self.position, self.length = truth, strength, position, length
        self.garbage, self.too_many, self.retry_after, self.crash_at = garbage, too_many, retry_after, crash_at
        self.logprobs, self.obeys, self.on_call, self.seed = logprobs, obeys, on_call, seed
        self.url = ""
        self.calls = 0
        """Requests that arrived, whatever became of them."""
        self.paid: Counter[str] = Counter()
        """Replies that were given, by the hash of their request: what a provider asks money for."""
        self.requests: list[dict[str, Any]] = []
        """Those that were replied to."""
        self._turned_away: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.judge = self
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def revive(self) -> None:
        """Go on after a crash."""
        self.crash_at = None

    def receive(self, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        """Status, headers and reply to a request; None: the connection is closed without one."""
        digest = blake2b(body, digest_size=16).hexdigest()
        with self._lock:
            self.calls += 1
            number = self.calls
            if self.crash_at is not None and number >= self.crash_at:
                return None
            if digest not in self._turned_away and self._draw(digest, "too many") < self.too_many:
                self._turned_away.add(digest)
                return 429, {"Retry-After": str(self.retry_after)}, b'{"error": {"message": "too many requests"}}'
        if self.on_call is not None:
            self.on_call(number)
        request: dict[str, Any] = json.loads(body)
        reply = json.dumps(self.reply_to(request, digest)).encode()
        with self._lock:
            self.paid[digest] += 1
            self.requests.append(request)
        return 200, {}, reply

    def reply_to(self, request: dict[str, Any], digest: str) -> dict[str, Any]:
        text: str = request["messages"][-1]["content"]
        mark = _MARK.search(text)
        fence = mark[0] if mark else ""
        content, before = _GARBAGE, ""
        probability: dict[str, float] = {}
        if self._draw(digest, "garbage") >= self.garbage:
            prompt = _between(text, fence, "conversation", "end of the conversation")
            a, b = (_between(text, fence, f"answer {place}", f"end of answer {place}") for place in "AB")
            probability = self.probabilities(prompt, a, b)
            draw, better = self._draw(digest, "verdict"), "tie"
            if draw < probability["A"]:
                better = "A"
            elif draw < probability["A"] + probability["B"]:
                better = "B"
            before = f'{fence}\n{{"reason": "as it was made to", "better": "'
            content = f'{before}{better}"}}'
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": content}}
        if self.logprobs and request.get("logprobs"):
            choice["logprobs"] = {"content": _tokens(content, before, probability)}
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": len(content) // 4}
        usage["total_tokens"] = sum(usage.values())
        return {"object": "chat.completion", "model": request.get("model"), "choices": [choice], "usage": usage}

    def probabilities(self, prompt: str, a: str, b: str) -> dict[str, float]:
        """Of the verdicts A, B and tie on two answers."""
        if self.obeys is not None:
            orders = [re.search(self.obeys, text) is not None for text in (a, b)]
            if orders[0] != orders[1]:
                return {"A": float(orders[0]), "B": float(orders[1]), "tie": 0.0}
        worth = self.truth(prompt, a, b)
        longer = self.length * (len(a) - len(b)) / _CHARACTERS
        log_odds = longer if worth == 0 else math.copysign(self.strength, worth) + longer
        seen = 1 / (1 + math.exp(-max(-700.0, min(700.0, log_odds))))
        is_tie = worth == 0 and self.length == 0
        unseen = 2 * abs(self.position)
        return {
            "A": unseen * (self.position > 0) + (1 - unseen) * (0.0 if is_tie else seen),
            "B": unseen * (self.position < 0) + (1 - unseen) * (0.0 if is_tie else 1 - seen),
            "tie": (1 - unseen) * is_tie,
        }

    def _draw(self, digest: str, what: str) -> float:
        """A number from 0 to 1 that depends on the request and on what is drawn."""
        hashed = blake2b(f"{self.seed} {what} {digest}".encode(), digest_size=8).digest()
        return int.from_bytes(hashed, "big") / 2**64


def _between(text: str, fence: str, begin: str, end: str) -> str:
    """What stands in a fence; empty where there is none of that name."""
    _, found, rest = text.partition(f"{fence} {begin}\n")
    return rest.partition(f"\n{fence} {end}")[0] if found else ""


def _tokens(content: str, before: str, probability: dict[str, float]) -> list[dict[str, Any]]:
    """The reply in three tokens, the verdict with its alternatives."""
    if not before:
        return [{"token": content, "logprob": 0.0, "top_logprobs": []}]
    alternatives = [
        {"token": verdict, "logprob": math.log(share)} for verdict, share in probability.items() if share > 0
    ]
    verdict = content[len(before) :].partition('"')[0]
    return [
        {"token": before, "logprob": 0.0, "top_logprobs": []},
        {"token": verdict, "logprob": math.log(probability[verdict]), "top_logprobs": alternatives},
        {"token": content[len(before) + len(verdict) :], "logprob": 0.0, "top_logprobs": []},
    ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # clients keep their connections
    request_queue_size = 64  # a client that is turned away tries again a second later
    judge: StubJudge

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that is killed while it waits


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two of them wait for each other

    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        reply = self.server.judge.receive(self.rfile.read(int(self.headers["Content-Length"])))
        if reply is None:
            self.close_connection = True
            return
        status, headers, body = reply
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
