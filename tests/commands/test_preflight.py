"""Whatever can be known before training is checked before training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from preflight_cases import CASES, PROMPTS, Case, attempt, gate, write

from kedge.commands.check import RecipeReport, check_recipe, refuse_unfit
from kedge.commands.checks import data as check_data
from kedge.commands.checks import machine as check_machine
from kedge.core.errors import ConfigError
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.schema import load_recipe

GOOD = '{kind: function, path: "mine.py:good"}'


SLOW = (
    *("no_answer", "kills", "hangs", "words", "quits", "with a syntax error"),
    *("a part of a mix", "no judge", "a policy as reward model"),
)
"""A child process or a model each; the other cases go the same ways."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name.endswith(SLOW) else []) for case in CASES],
)
def test_a_fault_that_can_be_known_makes_a_recipe_unfit(case: Case) -> None:
    assert attempt(case) is None


def checked(folder: Path, reward: str, more: str = "", **options: Any) -> RecipeReport:
    return check_recipe(load_recipe(write(Case(name="", reward=reward, words=(), more=more), folder)), **options)


def table(report: RecipeReport) -> dict[str, str]:
    return {row.what: row.result for row in report.checked}


def test_a_good_function_is_called_once_and_a_run_may_start(tmp_path: Path) -> None:
    report = checked(tmp_path, GOOD)
    assert report.is_fit
    assert table(report)["function"] == "called once: 1, 0"
    assert table(report)["prompts"] == "12; longest 38 of 512 tokens"
    refuse_unfit(load_recipe(tmp_path / "a.yaml"))


def test_a_run_is_refused_with_the_same_words(tmp_path: Path) -> None:
    write(Case(name="", reward=GOOD.replace("good", "god"), words=()), tmp_path)
    with pytest.raises(ConfigError, match=r"ppo\.reward: .*has no function 'god' \(did you mean 'good'\?\)"):
        refuse_unfit(load_recipe(tmp_path / "a.yaml"))


def test_a_function_that_fails_on_one_made_up_answer_is_warned_of(tmp_path: Path) -> None:
    write(Case(name="", reward='{kind: function, path: "mine.py:number"}', words=()), tmp_path)
    (tmp_path / "mine.py").write_text("def number(answer):\n    return float(answer.text)\n")
    report = check_recipe(load_recipe(tmp_path / "a.yaml"))
    (found,) = [finding for finding in report.findings if finding.code == "reward.function_unscored"]
    assert report.is_fit
    assert "ValueError: could not convert string to float: 'This is an answer.'" in found.message
    assert "mine.py, line 2" in found.message


def test_a_gate_says_for_how_many_prompts_it_is_closed(tmp_path: Path) -> None:
    marked = [{**row, "risky": number < 5} for number, row in enumerate(PROMPTS)]
    file = write(Case(name="", reward=gate("risky"), words=(), prompts=marked), tmp_path)
    report = check_recipe(load_recipe(file))
    (row,) = [row for row in report.checked if row.what == "gate"]
    assert report.is_fit
    assert (row.subject, row.result) == ("risky: risky", "true for 5 of 12 prompts looked at")
    assert row.used_by == ("ppo.reward",)


def test_what_two_stages_use_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.rewards import probe

    calls: list[str] = []
    real = probe.probe
    monkeypatch.setattr(probe, "probe", lambda *args, **kwargs: calls.append("called") or real(*args, **kwargs))
    file = write(Case(name="", reward=GOOD, words=()), tmp_path)
    eval_stage = f"  eval: {{kind: evaluate, models: [ppo], reward: {GOOD}, gold: {GOOD}, prompts: prompts.jsonl}}\n"
    file.write_text(file.read_text() + eval_stage)
    report = check_recipe(load_recipe(file))
    assert calls == ["called"]
    (row,) = [row for row in report.checked if row.what == "function"]
    assert row.used_by == ("ppo.reward", "eval.reward", "eval.gold")


def test_long_prompts_that_are_dropped_or_cut_are_told_and_not_fatal(tmp_path: Path) -> None:
    long = next(case for case in CASES if case.name == "a long prompt")
    for too_long, words in (("drop", "left out (too_long: drop)"), ("cut", "they lose their beginning")):
        file = write(Case(name="", reward="{kind: exact}", words=(), prompts=long.prompts), tmp_path)
        report = check_recipe(load_recipe(file, [f"stages.ppo.too_long={too_long}"]))
        (found,) = [finding for finding in report.findings if finding.code == "prompts.too_long"]
        assert (found.level, report.is_fit) == ("warning", True)
        assert words in found.message


def test_of_many_prompts_the_first_ones_are_measured_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_data, "MEASURED_PROMPTS", 5)
    report = checked(tmp_path, "{kind: exact}")
    assert table(report)["prompts"].startswith("first 5 of 12; longest ")
    assert table(report)["source"] == "5 of first 5 of 12 prompts have an `answer`"


class _Scorer(BaseHTTPRequestHandler):
    requests: list[Any] = []  # noqa: RUF012 (shared by the requests of one test)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        reply = json.dumps({"scores": [0.25] * len(body["answers"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Scorer.requests.clear()
    with HTTPServer(("127.0.0.1", 0), _Scorer) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/score"
        served.shutdown()


def test_a_server_is_asked_once(tmp_path: Path, server: str) -> None:
    report = checked(tmp_path, f"{{kind: http, url: '{server}'}}")
    assert table(report)["server"] == "asked once: 0.25"
    (request,) = _Scorer.requests
    assert [answer["solution"] for answer in request["answers"]] == ["1"]


def test_offline_no_server_is_asked(tmp_path: Path) -> None:
    report = checked(tmp_path, "{kind: http, url: 'http://127.0.0.1:9/score'}", offline=True)
    assert report.is_fit
    assert table(report)["server"] == "not asked (--offline)"


class _Judge(_Scorer):
    """Takes the first answer if the model is `place`, and names none if it is `dumb`."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        text = body["messages"][0]["content"]
        is_first = body["model"] == "place" or text.index("This is an answer.") < text.index("\nYes.\n")
        content = "hm" if body["model"] == "dumb" else '{"better": "%s"}' % ("A" if is_first else "B")
        reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def judged(folder: Path, url: str, *models: str, **options: Any) -> RecipeReport:
    panel = ", ".join(f"{{kind: judge, url: '{url}', model: {model}}}" for model in models)
    stage = f"  eval: {{kind: evaluate, models: [tiny, ./other], prompts: ask.jsonl, judge: [{panel}]}}\n"
    (folder / "ask.jsonl").write_text('{"prompt": "Is it?"}\n')
    make_tiny(folder / "other", seed=3, hidden=32, layers=1)
    (folder / "a.yaml").write_text(f"kedge: 1\nname: a\nmodel: tiny\nstages:\n{stage}")
    return check_recipe(load_recipe(folder / "a.yaml"), **options)


def test_the_judges_of_an_evaluation_are_asked_once(tmp_path: Path) -> None:
    _Judge.requests.clear()
    with HTTPServer(("127.0.0.1", 0), _Judge) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        report = judged(tmp_path, f"http://127.0.0.1:{served.server_port}/v1", "fair", "place", "dumb")
        served.shutdown()
    rows = {row.subject.split()[0]: (row.result, row.used_by) for row in report.checked if row.what == "judge"}
    assert rows == {
        "fair": ("asked once: names a winner, the same in both orders", ("eval.judge.0",)),
        "place": ("asked once: names a winner, another one in the other order", ("eval.judge.1",)),
        "dumb": ("asked once: names no winner", ("eval.judge.2",)),
    }
    assert [request["model"] for request in _Judge.requests] == ["fair"] * 2 + ["place"] * 2 + ["dumb"] * 2
    assert report.is_fit
    assert [(found.level, found.where) for found in report.findings if found.code == "judge.unreadable"] == [
        ("warning", "eval.judge.2")
    ]


def test_a_judge_that_is_not_there_makes_a_recipe_unfit(tmp_path: Path) -> None:
    report = judged(tmp_path, "http://127.0.0.1:9/v1", "fair")
    (found,) = [finding for finding in report.findings if finding.level == "fatal"]
    assert (found.code, found.where) == ("judge.server", "eval.judge.0")
    assert found.message.startswith("http://127.0.0.1:9/v1 was asked to compare two made-up answers and did not: ")
    assert judged(tmp_path, "http://127.0.0.1:9/v1", "fair", offline=True).is_fit


def test_a_disk_without_room_for_the_checkpoints_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_machine, "free_bytes", lambda path: 1000)
    report = checked(tmp_path, "{kind: exact}")
    (found,) = report.machine
    assert (found.level, found.code) == ("fatal", "machine.disk")
    assert "has 1000 bytes free" in found.message


def test_a_device_that_is_not_there_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = write(Case(name="", reward="{kind: exact}", words=()), tmp_path)
    assert [finding.code for finding in check_recipe(load_recipe(file, ["device=cuda"])).machine] == ["machine.device"]
