"""Badcases whose answers somebody else checks: a judge behind a server, and a reward model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.gate.badcases import Badcase
from kedge.gate.checks import Check
from kedge.gate.replayed import CaseResult
from kedge.stages.gate import replay as replaying
from kedge.stages.gate.replay import Replay, replay

BAD = "two plus two is five"


class Judge(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers what `says` gives for a request; nothing makes it fail with 400."""

    daemon_threads = True
    says: Callable[[str], str]
    requests: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Judge  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.server.requests.append(text)
        reply = self.server.says(text)
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]}).encode()
        self.send_response(200 if reply else 400)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge(("127.0.0.1", 0), Handler)
    server.requests = []
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def case(check: dict[str, Any], **changes: Any) -> Badcase:
    fields: dict[str, Any] = {"severity": "block", "samples": 3, "needed": 3, "file": "cases.jsonl"} | changes
    prompt = (("user", "What is 2 + 2?"),)
    return Badcase(id="sum", prompt=prompt, bad=BAD, why="wrong", check=Check.model_validate(check), **fields)


def replayed(home: Path, *cases: Badcase) -> list[CaseResult]:
    how = Replay(
        model=str(home / "tiny"), files=[], folder=home, seed=1, device="cpu", dtype="float32", max_new_tokens=4
    )
    return replay(cases, how)


def asks(judge: Judge, **changes: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{judge.server_port}/v1"
    return {"judge": {"url": url, "model": "m", "retries": 0, "backoff_s": 0.001, "at_least": 7} | changes}


@pytest.mark.parametrize(("grade", "verdict"), [(7, "pass"), (6.5, "fail")])
def test_a_judge_grades_every_sample(ppo_home: Path, judge: Judge, grade: float, verdict: str) -> None:
    judge.says = lambda _: json.dumps({"reason": "r", "score": grade})
    (result,) = replayed(ppo_home, case(asks(judge)))
    assert result.verdict == verdict
    assert result.asked[0].good == (3 if verdict == "pass" else 0)
    assert len(judge.requests) == 3
    assert all("What is 2 + 2?" in request and BAD not in request for request in judge.requests)


@pytest.mark.parametrize(("needed", "verdict"), [(2, "pass"), (3, "undecided")])
def test_a_sample_that_the_judge_did_not_grade_is_not_good_and_not_bad(
    ppo_home: Path, judge: Judge, needed: int, verdict: str
) -> None:
    judge.says = lambda _: "" if len(judge.requests) == 1 else '{"score": 9}'
    (result,) = replayed(ppo_home, case(asks(judge, workers=1), needed=needed))
    assert (result.verdict, result.asked[0].good, result.asked[0].unknown) == (verdict, 2, 1)


@pytest.mark.parametrize("is_better", [True, False])
def test_a_sample_must_score_higher_than_the_bad_answer(
    ppo_home: Path, monkeypatch: pytest.MonkeyPatch, is_better: bool
) -> None:
    """The bad answer is put below, or above, whatever a reward model says of the samples."""
    seen: list[list[Answer]] = []
    load = replaying._model_scorer

    def scorer(*given: Any) -> Callable[[list[Answer]], list[float]]:
        score = load(*given)

        def noted(answers: list[Answer]) -> list[float]:
            seen.append(answers)
            *scores, bad = score(answers)
            assert bad == bad
            return [*scores, min(scores) - 1 if is_better else max(scores)]

        return noted

    monkeypatch.setattr(replaying, "_model_scorer", scorer)
    (result,) = replayed(ppo_home, case({"beats": "judge"}))
    assert result.verdict == ("pass" if is_better else "fail")
    assert [answer.text for answer in seen[0]][-1] == BAD
    assert len(seen[0]) == 4


def test_a_reward_model_decides_as_its_scores_do(ppo_home: Path) -> None:
    """The same model scores the samples and the bad answer once more, by its own command."""
    (result,) = replayed(ppo_home, case({"beats": {"kind": "model", "from": "judge"}}, needed=1))
    (other,) = replayed(ppo_home, case({"beats": "judge"}, needed=1))
    assert result == other
    better = replaying._model_scorer(
        replaying.reward_settings("judge", where=""),  # pyright: ignore[reportArgumentType]
        Replay(model=str(ppo_home / "tiny"), files=[], folder=ppo_home, seed=1, device="cpu"),
    )
    prompt = (("user", "What is 2 + 2?"),)
    scores = better([Answer(prompt=prompt, text=text, is_finished=True) for text in (result.asked[0].example, BAD)])
    assert (result.asked[0].good == 3) == (result.asked[0].example == "")
    assert not result.asked[0].example or scores[0] <= scores[1]


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ({"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}}, "check.judge: needs `at_least`"),
        ({"judge": {"model": "m", "at_least": 7}}, "check.judge: url: Field required"),
        ({"beats": {"kind": "model"}}, "check.beats: from: Field required"),
        ({"beats": "nowhere"}, "nowhere"),
    ],
)
def test_a_check_that_cannot_work_costs_no_sampling(
    ppo_home: Path, monkeypatch: pytest.MonkeyPatch, check: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr(replaying, "answer", lambda *_, **__: pytest.fail("sampled"))
    with pytest.raises((ConfigError, ValueError), match=text):
        replayed(ppo_home, case(check))
