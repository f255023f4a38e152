"""A simulated AI behind OpenAI's protocol on loopback: critic, reviser and judge in the demo's world (`kedge.demo`).

A model of 118 thousand weights cannot criticise, so this stands for one that can, with a known skill. It reads what is
fenced in a request and the principle in it, and sees what a reader of the shop's replies would see of that principle:
rude sentences, empty ones, facts that are wrong or missing. It notices each fault with probability `skill`; as often as
it misses, it revises clumsily (an empty phrase more) or prefers the other answer. Replies depend on the request and the
seed alone, so that a request that is sent twice has one reply.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

from kedge.demo.phrases import COURTESIES, FACTS, PADDINGS, RUDENESSES
from kedge.demo.truth import facts_of, read_reply
from kedge.feedback.constitution import Principle

NOTHING = "There is nothing to criticise."
_MARK = re.compile(r"\[\[[0-9a-f]{32}\]\]")
_SENTENCE = re.compile(r"[^.!?]*[.!?]+|[^.!?]+$")
_WHOLE = FACTS[frozenset(("order", "item", "remedy"))]
_STATEMENTS = tuple(
    re.compile(re.sub(r"\\{\w+\\}", r"[\\w]+", re.escape(text))) for texts in FACTS.values() for text in texts
)


def sentences(answer: str) -> list[str]:
    return [sentence.strip() for sentence in _SENTENCE.findall(answer) if sentence.strip()]


def faults(aspect: str, message: str, answer: str) -> list[str]:
    """What a reader sees of one principle: the sentences at fault, or the facts."""
    parts = sentences(answer)
    facts = {} if not _is_message(message) else facts_of(message)
    match aspect:
        case "rude" | "threat":
            return [part for part in parts if part in RUDENESSES]
        case "plain":
            repeated = [part for place, part in enumerate(parts) if part in parts[:place]]
            return [part for part in parts if part in PADDINGS] + repeated
        case "facts":
            named = _named(answer)
            return [name for name, value in facts.items() if named[name] - {value}]
        case "answers-it":
            named = _named(answer)
            return [name for name in facts if not named[name]]
        case _:
            return []  # nothing in this world is about it


def mended(aspect: str, message: str, answer: str, rng: Random) -> str:
    """The answer without these faults."""
    wrong = set(faults(aspect, message, answer))
    parts = sentences(answer)
    if aspect in ("facts", "answers-it"):
        statement = rng.choice(_WHOLE).format_map(facts_of(message))
        place = next((at for at, part in enumerate(parts) if _is_statement(part)), 0)
        rest = [part for part in parts if not _is_statement(part)]
        return " ".join([*rest[:place], statement, *rest[place:]])
    left = list(dict.fromkeys(part for part in parts if part not in wrong))
    polite = [rng.choice(COURTESIES)] if aspect == "rude" and not set(left) & set(COURTESIES) else []
    return " ".join([*polite, *left])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAI:
    """`skill` is the probability with which it notices a fault, and sides with the better of two answers."""

    principles: Sequence[Principle]
    skill: float = 0.85
    seed: int = 0

    def reply(self, request: str) -> str:
        rng = Random(blake2b(f"{self.seed} {request}".encode(), digest_size=8).digest())
        marks = _MARK.findall(request)
        parts = _fenced(request, marks[0]) if marks else {}
        aspect = self._aspect(request)
        message = parts.get("conversation", "").removeprefix("user: ")
        if "answer A" in parts:
            return json.dumps({"reason": aspect, "better": self._choice(aspect, message, parts, rng)})
        answer = parts.get("answer", "")
        if "critique" not in parts:
            return self._critique(aspect, message, answer, rng)
        return f"{marks[0]}\n{self._revision(aspect, message, answer, parts['critique'], rng)}"

    def _aspect(self, request: str) -> str:
        """The principle that the request is about; of a comparison without one, whether an answer is rude."""
        texts = {text: own.id for own in self.principles for text in (own.critique, own.revision, own.choice)}
        return next((name for text, name in texts.items() if text in request), "rude")

    def _critique(self, aspect: str, message: str, answer: str, rng: Random) -> str:
        noticed = [fault for fault in faults(aspect, message, answer) if rng.random() < self.skill]
        if noticed:
            return f"By the principle {aspect!r} this is wrong: {'; '.join(noticed)}"
        return NOTHING

    def _revision(self, aspect: str, message: str, answer: str, critique: str, rng: Random) -> str:
        if critique == NOTHING:
            return answer
        better = mended(aspect, message, answer, rng)
        return better if rng.random() < self.skill else f"{better} {rng.choice(PADDINGS)}"

    def _choice(self, aspect: str, message: str, parts: dict[str, str], rng: Random) -> str:
        first, second = (len(faults(aspect, message, parts[name])) for name in ("answer A", "answer B"))
        if first == second:
            return "tie"
        better, worse = ("A", "B") if first < second else ("B", "A")
        return better if rng.random() < self.skill else worse


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJudge:
    """It compares two replies, or grades one from 1 to 9, by everything that the true preference is about. It notices
    each merit and each fault with probability `skill`, anew in every request, and has two blind spots: more than two
    courtesies please it still, and a reply is never too long."""

    skill: float = 0.85
    seed: int = 0

    def reply(self, request: str) -> str:
        rng = Random(blake2b(f"{self.seed} {request}".encode(), digest_size=8).digest())
        marks = _MARK.findall(request)
        parts = _fenced(request, marks[0]) if marks else {}
        message = parts.get("conversation", "").removeprefix("user: ")
        if "answer A" in parts:
            first, second = (self.opinion(message, parts[name], rng) for name in ("answer A", "answer B"))
            return json.dumps({"better": "tie" if first == second else "A" if first > second else "B"})
        return json.dumps({"score": min(9, max(1, round(4 + self.opinion(message, parts.get("answer", ""), rng))))})

    def opinion(self, message: str, answer: str, rng: Random) -> float:
        """What it notices, added up: 5 of a perfect reply where it notices everything."""
        if not _is_message(message):
            return 0.0  # nothing of this world
        reading = read_reply(message, answer)
        counts = reading.counts
        facts = {"right": 1.0, "wrong": -1.0, "missing": 0.0}
        courtesies = [1.0, *[0.5] * (counts["courtesy"] - 1)] if counts["courtesy"] else []
        merits = [*(facts[state] for state in reading.facts.values()), *courtesies, 0.5 * reading.is_signed]
        wrong = [-2.0] * counts["rudeness"] + [-0.75] * counts["padding"] + [-0.5] * counts["nonsense"]
        wrong += [-1.0] * reading.num_repeated + [-1.0 * (not reading.is_finished)]
        return sum(value for value in (*merits, *wrong) if rng.random() < self.skill)


@dataclass(slots=True, kw_only=True)
class Served:
    """Where the AI listens, and how many calls came."""

    url: str
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(reply: Callable[[str], str]) -> Generator[Served]:
    """An OpenAI-compatible endpoint on loopback that replies with `reply(the last message)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: two of them wait for each other

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.calls += 1
            asked = body["messages"][-1]["content"]
            text = reply(asked)
            usage = {"prompt_tokens": len(asked.split()), "completion_tokens": len(text.split())}
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            content = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served = Served(url=f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _fenced(request: str, mark: str) -> dict[str, str]:
    """What stands between the marks, by name."""
    found = re.findall(rf"{re.escape(mark)} ([\w ]+)\n(.*?)\n{re.escape(mark)} end of", request, re.DOTALL)
    return {name: text.strip() for name, text in found}


def _is_message(message: str) -> bool:
    return bool(re.search(r"\border \d+\b", message))


def _is_statement(sentence: str) -> bool:
    return any(pattern.fullmatch(sentence) for pattern in _STATEMENTS)


def _named(answer: str) -> dict[str, set[str]]:
    """The values that an answer names for each fact."""
    from kedge.demo.writers import VALUES

    words = set(re.findall(r"\w+", answer))
    return {name: words & set(values) for name, values in VALUES.items()}
