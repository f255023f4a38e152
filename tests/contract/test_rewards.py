"""What every source of rewards promises, ours or another's: add a factory to `SOURCES` and it is checked.

One score a row, in the order of the rows, whatever they hold; NaN instead of an exception; the same again when asked
again; nothing of one row in the score of another.
"""

from __future__ import annotations

import json
import math
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
from kedge.rewards import function, http, judge, maths, unit_tests, verifiable
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import CountedSource, FailureCounter
from kedge.rewards.model import on_text
from kedge.rewards.settings import (
    TEXT_KINDS,
    ExactSource,
    FailureSettings,
    FunctionSource,
    HttpSource,
    JsonSource,
    JudgeSource,
    MathSource,
    ModelSource,
    NumericSource,
    RegexSource,
    UnitTestsSource,
)


@dataclass(frozen=True)
class Place:
    """Where a source may find things: a folder, and a server that scores and judges."""

    context: RewardContext
    url: str


class Letters:
    """A reward model: the sum of its tokens."""

    objectives = ("reward",)

    def score_tokens(
        self, tokens_BT: torch.Tensor, attention_mask_BT: torch.Tensor, *, normalised: bool = True
    ) -> torch.Tensor:
        return (tokens_BT * attention_mask_BT).sum(dim=1, keepdim=True) / 1000


def _function(place: Place) -> TextSource:
    (place.context.folder / "mine.py").write_text("def score(answers):\n    return [len(a.text) for a in answers]\n")
    return function.make(FunctionSource(kind="function", path="mine.py:score"), place.context)


def _math(place: Place) -> TextSource:
    def verify(pairs: Sequence[tuple[str, str]], timeout_s: float) -> list[bool | None]:
        return [gold == found for gold, found in pairs]

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
    "unit_tests": lambda place: unit_tests.make(UnitTestsSource(kind="unit_tests", extract="whole"), place.context),
    "math": _math,
    "function": _function,
    "model": _model,
    "http": _http,
    "judge": _judge,
    "counted": _counted,
}

TEXTS = [
    "42",
    "",
    "  ",
    "żółć 日本語 🙂 \u202e",
    "x" * 5000,
    '{"a": 1}',
    "a = 42",
    "null\x00byte",
    "\ud800 lone",
    "42.",
]


def answers() -> list[Answer]:
    """Odd rows have a known solution and tests; one was cut off, one has no prompt."""
    return [
        Answer(
            prompt=(("user", "¿qué?"),) if index else (),
            text=text,
            is_finished=index != 4,
            solution="42" if index % 2 else None,
            extra={"tests": ["assert a == 42"]} if index % 2 else {},
        )
        for index, text in enumerate([*TEXTS, "42", "41", "42", "a = 42"])
    ]


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "answers" in body:
            said: dict[str, Any] = {"scores": [len(row["answer"]) for row in body["answers"]]}
        else:
            said = {"choices": [{"message": {"content": f"Score: {len(body['messages'][0]['content'])}"}}]}
        text = json.dumps(said).encode()
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


@pytest.fixture(params=sorted(SOURCES))
def source(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> TextSource:
    return SOURCES[request.param](Place(context=RewardContext(folder=tmp_path, seed=3), url=url))


def same(found: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(one == other or (math.isnan(one) and math.isnan(other)) for one, other in pairs)


def test_no_answers_no_scores(source: TextSource) -> None:
    assert source.score([]) == []


def test_one_number_a_row_and_never_infinity(source: TextSource) -> None:
    scores = source.score(answers())
    assert [type(score) for score in scores] == [float] * len(answers())
    assert not any(math.isinf(score) for score in scores)
    assert len({str(score) for score in scores}) > 1  # a source that says one thing of everything teaches nothing


def test_scores_follow_their_rows(source: TextSource) -> None:
    rows = answers()
    scores = source.score(rows)
    assert same(source.score(rows[::-1]), scores[::-1])
    assert same(source.score(rows[3:6]), scores[3:6])


def test_the_same_question_has_the_same_answer(source: TextSource) -> None:
    assert same(source.score(answers()), source.score(answers()))


def test_any_sequence_will_do(source: TextSource) -> None:
    assert same(source.score(tuple(answers())), source.score(answers()))


def test_every_kind_of_text_source_has_an_entry_point() -> None:
    assert set(TEXT_KINDS) == set(names("rewards"))
