"""Our reward sources against their contracts: add a factory to `SOURCES` and it is checked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core.answers import Answer, TextSource
from kedge.core.plugins import names
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts
from kedge.rewards import function, http, judge, maths, unit_tests, verifiable
from kedge.rewards.build import Mix
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import CountedSource, FailureCounter
from kedge.rewards.isolation import choose
from kedge.rewards.model import OnTokens, on_text
from kedge.rewards.rollouts import FromText, PromptRecord, answers_of
from kedge.rewards.settings import (
    TEXT_KINDS,
    CallableSource,
    ExactSource,
    FailureSettings,
    FunctionSource,
    HttpSource,
    JsonSource,
    JudgeSource,
    MathSource,
    MixSource,
    ModelSource,
    NumericSource,
    RegexSource,
    UnitTestsSource,
)
from kedge.testing.contracts import RewardSourceContract, TextSourceContract

WALLS: Any = choose("any")  # also as root on a machine without namespaces


@dataclass(frozen=True)
class Place:
    """Where a source may find things: a folder, and a server that scores and judges."""

    context: RewardContext
    url: str


class Letters:
    """A reward model: the sum of its tokens."""

    objectives = ("reward",)
    device = torch.device("cpu")

    def score_tokens(
        self, tokens_BT: torch.Tensor, attention_mask_BT: torch.Tensor, *, normalised: bool = True
    ) -> torch.Tensor:
        return (tokens_BT * attention_mask_BT).sum(dim=1, keepdim=True) / 1000


def _function(place: Place) -> TextSource:
    (place.context.folder / "mine.py").write_text("def score(answers):\n    return [len(a.text) for a in answers]\n")
    return function.make(FunctionSource(kind="function", path="mine.py:score"), place.context)


def _callable(place: Place) -> TextSource:
    settings = {"kind": "callable", "function": lambda answers: [len(answer.text) for answer in answers]}
    return function.make_callable(CallableSource.model_validate(settings), place.context)


def _math(place: Place) -> TextSource:
    def verify(pairs: Sequence[tuple[str, str]], timeout_s: float) -> list[bool | None]:
        return [solution == answer for solution, answer in pairs]

    return maths.source(MathSource(kind="math"), verify)


def _model(place: Place) -> TextSource:
    settings = ModelSource.model_validate({"kind": "model", "from": "reward", "rows": 2})
    return on_text(Letters(), settings, lambda answer: [1, *answer.text.encode("utf-8", "replace")])


def _http(place: Place) -> TextSource:
    return http.make(HttpSource(kind="http", url=place.url, batch=2), place.context)


def _judge(place: Place) -> TextSource:
    return judge.make(JudgeSource(kind="judge", url=place.url, model="m", lowest=0, highest=1e6), place.context)


def _counted(place: Place) -> TextSource:
    source = verifiable.make_exact(ExactSource(kind="exact"), place.context)
    return CountedSource(source, FailureCounter("reward", FailureSettings(max_share=1.0)))


SOURCES: dict[str, Callable[[Place], TextSource]] = {
    "exact": lambda place: verifiable.make_exact(ExactSource(kind="exact"), place.context),
    "numeric": lambda place: verifiable.make_numeric(NumericSource(kind="numeric"), place.context),
    "regex": lambda place: verifiable.make_regex(RegexSource(kind="regex", pattern=r"\w{3}"), place.context),
    "json_schema": lambda place: verifiable.make_json(JsonSource(kind="json_schema"), place.context),
    "unit_tests": lambda place: unit_tests.make(
        UnitTestsSource(kind="unit_tests", extract="whole", isolation=WALLS), place.context
    ),
    "math": _math,
    "function": _function,
    "callable": _callable,
    "model": _model,
    "http": _http,
    "judge": _judge,
    "counted": _counted,
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "answers" in body:
            reply: dict[str, Any] = {"scores": [len(row["answer"]) for row in body["answers"]]}
        else:
            reply = {"choices": [{"message": {"content": json.dumps({"score": len(body["messages"][0]["content"])})}}]}
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Listening(ThreadingHTTPServer):
    request_queue_size = 64  # a client that is turned away tries again a second later


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Listening(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class TestTextSources(TextSourceContract):
    @pytest.fixture(autouse=True, params=sorted(SOURCES))
    def _place(self, request: pytest.FixtureRequest, url: str, tmp_path: Path) -> None:
        self._factory = SOURCES[request.param]
        self._where = Place(context=RewardContext(folder=tmp_path, seed=3), url=url)

    def make(self) -> TextSource:
        return self._factory(self._where)


def _on_tokens() -> RewardSource:
    settings = ModelSource.model_validate({"kind": "model", "from": "reward", "rows": 2})
    return OnTokens(Letters(), settings, FailureCounter("reward", FailureSettings()))


def _read(rollouts: Rollouts) -> list[Answer]:
    record = PromptRecord(prompt=(("user", "Which?"),), solution="7 8")
    return answers_of(rollouts, prompt_of=lambda group: record, decode=lambda tokens: " ".join(map(str, tokens)))


def _from_text() -> RewardSource:
    return FromText(verifiable.make_exact(ExactSource(kind="exact"), RewardContext(folder=Path(), seed=3)), _read)


def _mix() -> RewardSource:
    parts = {"model": _on_tokens(), "right": _from_text()}
    settings = {"kind": "mix", "weights": {"right": 0.5}, "parts": {name: {"kind": "exact"} for name in parts}}
    return Mix(parts, MixSource.model_validate(settings), lambda _: [])


class TestRewardSources(RewardSourceContract):
    @pytest.fixture(autouse=True, params=[_on_tokens, _from_text, _mix])
    def _made_by(self, request: pytest.FixtureRequest) -> None:
        self._factory = request.param

    def make(self) -> RewardSource:
        return self._factory()


def test_every_kind_of_text_source_has_an_entry_point() -> None:
    assert set(TEXT_KINDS) == set(names("rewards"))
