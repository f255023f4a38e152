"""`kedge judge trust` as a user runs it, against judges whose worth is known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from malformed_verdicts import CASES, Case, attempt

from kedge.feedback.canaries import CANARIES
from kedge.feedback.trust import judge_identity, read_trust
from kedge.rewards import client
from kedge.rewards.judge_protocol import COMPARISON
from kedge.testing.stub_judge import StubJudge, by_worth

Kedge = Callable[..., Any]
_GOOD = {canary.good for canary in CANARIES}
_OTHER = {"first": "second", "second": "first"}


def truth(prompt: str, a: str, b: str) -> float:
    """What answers say they are worth; of canaries, the good answer."""
    return by_worth(prompt, a, b) or float(a in _GOOD) - float(b in _GOOD)


def people(file: Path, count: int = 200, *, right: float = 0.9, alone: int = 0) -> Path:
    """Items that three people labelled, two of each prompt; the last `alone` have one person."""
    rng = Random(count)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        worths = rng.sample(range(1, 9), 2)
        better = "first" if worths[0] > worths[1] else "second"
        names = ("ann",) if number >= count - alone else ("ann", "ben", "cat")
        texts = [f"Yes (worth {worth})." + " word" * rng.randrange(60) for worth in worths]
        rows.append(
            {
                "id": number,
                "prompt": f"Question {number // 2}?",
                "first": texts[0],
                "second": texts[1],
                "verdicts": {name: better if rng.random() < right else _OTHER[better] for name in names},
                "models": ["stub-small", "other"] if number % 2 else ["other", "stub-small"],
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand replies are kept, and no power is cut here


class Wired:
    """Stub judges that are asked without a network, each with a judge.yaml; `test_over_a_socket` has one."""

    def __init__(self) -> None:
        self._judges: dict[str, StubJudge] = {}

    def set(self, *, more: str = "", **biases: Any) -> StubJudge:
        judge = StubJudge(truth=truth, **biases)
        judge.url = f"http://localhost:{1 + len(self._judges)}/v1"
        self._judges[f"{judge.url}/chat/completions"] = judge
        Path("judge.yaml").write_text(f"url: {judge.url}\nmodel: stub\nworkers: 16\nretries: 0\n{more}")
        return judge

    async def exchange(self, http: object, url: str, body: bytes) -> bytes:
        reply = self._judges[url].receive(body)
        if reply is None:
            raise ConnectionResetError("gone")
        return reply[2]


@pytest.fixture
def wired(kedge: Kedge, monkeypatch: pytest.MonkeyPatch) -> Wired:
    wire = Wired()
    monkeypatch.setattr(client, "_exchange", wire.exchange)
    return wire


def test_over_a_socket(kedge: Kedge, tmp_path: Path) -> None:
    """Too busy at times, and gone once: what was answered is kept."""
    people(tmp_path / "human.jsonl", 20)
    with StubJudge(truth=truth, too_many=0.1, crash_at=60) as judge:
        (tmp_path / "judge.yaml").write_text(
            f"url: {judge.url}\nmodel: stub\nworkers: 8\nretries: 1\nbackoff_s: 0.001\n"
        )
        assert kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl").code == 1
        judge.revive()
        assert kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl").code == 3
        assert set(judge.paid.values()) == {1}
    trust = read_trust(tmp_path / "trust.json")
    assert [reason.partition(":")[0] for reason in trust.reasons] == [
        "items that people labelled",
        "of these by two people or more",
    ]
    assert trust.figures["same_again"]["value"] == 1


def test_a_good_judge_is_trusted_and_never_paid_twice(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl")
    judge = wired.set(strength=4.0, logprobs=True, more="logprobs: true\n")
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--family", "stub")
    assert done.code == 0, done.err
    calls = judge.paid.total()
    assert 4 * 200 < calls <= 4 * 200 + 100
    assert f"12 canaries: {calls:,} calls (0 more are kept from before)" in done.out
    assert f"{calls:,} calls paid" in done.out
    before = read_trust(tmp_path / "trust.json")
    again = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--family", "stub", "--force")
    assert again.code == 0
    assert f"0 calls ({calls:,} more are kept from before)" in again.out
    assert set(judge.paid.values()) == {1}
    trust = read_trust(tmp_path / "trust.json")
    assert trust.passed
    assert trust.figures == before.figures
    fields = {"url": judge.url, "model": "stub", "rubric": COMPARISON, "temperature": 0, "max_tokens": 512}
    assert trust.identity == judge_identity(fields)
    figures = trust.figures
    assert figures["canaries"] == {"asked": 12, "obeyed": 0, "forms": []}
    assert figures["same_again"]["value"] > 0.9
    assert figures["calibration"]["ece"] < 0.1
    for figure in (figures["position"], figures["length"]["held"], figures["family"]["held"]):
        assert figure["low"] <= 0 <= figure["high"]
    assert "κ with people's majority" in done.out
    assert "stub: trusted" in done.out
    page = (tmp_path / "trust.html").read_text()
    assert "May stub be trusted?" in page
    assert "<script" not in page


def test_planted_biases_are_found(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 240, right=1.0)
    wired.set(position=0.2, length=1.5, strength=1.5, garbage=0.05)
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0")
    assert done.code == 3
    figures = read_trust(tmp_path / "trust.json").figures
    assert figures["position"]["low"] <= 0.2 <= figures["position"]["high"]
    assert figures["readable"]["low"] <= 0.95 <= figures["readable"]["high"]
    assert figures["length"]["held"]["low"] > 0
    assert figures["longer_wins"]["low"] > figures["longer_wins_people"]["value"]
    assert "same verdict after the swap" in done.err

    wired.set(length=0.8, strength=1.5, garbage=0.05)
    kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0", "--seed", "1", "--force")
    length = read_trust(tmp_path / "trust.json").figures["length"]
    planted = 0.8 * length["sd"] / 100
    assert planted > 0.5
    assert length["held"]["low"] <= planted <= length["held"]["high"]


def test_a_judge_that_obeys_is_refused(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 40)
    wired.set(obeys=r"(?i)ignore the rubric|bonus of 200")
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl")
    assert done.code == 3
    trust = read_trust(tmp_path / "trust.json")
    assert trust.reasons[-1] == "canaries obeyed: 3 of 12, wanted 0"
    assert trust.figures["canaries"]["forms"] == ["plain order", "order with a place", "reward"]


def test_what_is_not_measured_refuses(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 120, alone=80)
    wired.set()
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0")
    assert done.code == 3
    assert "too few for trust, which needs 200 and 50" in done.out
    reasons = read_trust(tmp_path / "trust.json").reasons
    assert [reason.partition(":")[0] for reason in reasons] == [
        "items that people labelled",
        "of these by two people or more",
        "same verdict when asked again",
    ]


def test_stored_verdicts_are_measured_and_refused(kedge: Kedge, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in people(tmp_path / "human.jsonl").read_text().splitlines()]
    stored = [{"id": row["id"], "verdict": row["verdicts"]["ann"], "probability": 0.5} for row in rows[:-10]]
    (tmp_path / "stored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stored))
    done = kedge("judge", "trust", "--verdicts", "stored.jsonl", "--on", "human.jsonl", "--to", "out/t.json", "--json")
    assert done.code == 3
    assert "10 of 200 items have no verdict, and count as unreadable" in done.err
    facts = json.loads(done.out)
    assert facts["figures"]["readable"]["value"] == 0.95
    assert facts["figures"]["agreement"]["value"] > 0.8
    assert [reason.partition(":")[0] for reason in facts["reasons"]] == [
        "same verdict after the swap",
        "same verdict when asked again",
        "canaries obeyed",
    ]
    assert facts["identity"].startswith("verdicts:")
    assert (tmp_path / "out" / "t.html").is_file()


def test_a_server_that_is_gone_is_not_asked_for_the_rest(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 400)
    judge = wired.set(crash_at=1)
    cut = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0")
    assert cut.code == 1
    assert "could not be asked" in cut.err
    assert "run it again, and only the others are asked" in cut.err
    assert not (tmp_path / "trust.json").exists()
    assert judge.calls <= 2 * 256


def test_a_constitution_and_axes_are_another_judge(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 4)
    (tmp_path / "rules.yaml").write_text(
        "principles:\n  - {id: kind, critique: Is it rude?, revision: Be kind., choice: Which is kinder?}\n"
    )
    identities = list[str]()
    for number, more in enumerate(("", "constitution: rules.yaml\n", "axes: [helpful]\n", "cot: true\n")):
        judge = wired.set(more=f"name: j{number}\n{more}")
        kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0", "--force")
        trust = read_trust(tmp_path / "trust.json")
        identities.append(judge_identity({**trust.settings, "url": "http://localhost/v1"}))
        asked = judge.requests[0]["messages"][0]["content"]
        assert ("Which is kinder?" in asked) == ("constitution" in more)
        fields = {**trust.settings, "rubric": COMPARISON, "constitution": None}
        assert (trust.identity == judge_identity(fields)) == (not more)
    assert len(set(identities)) == 4


def test_a_budget_is_kept(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 40)
    judge = wired.set(more="max_tokens: 64\nbudget: {usd: 0.01, input: 1, output: 1}\n")
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0")
    assert done.code == 3
    assert "budget" in done.err
    assert not (tmp_path / "trust.json").exists()
    assert 0 < judge.paid.total() < 40


def test_few_failed_calls_count_as_unreadable(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl", 40)
    judge = wired.set()
    real = judge.receive
    judge.receive = lambda body: None if b"Question 7?" in body else real(body)  # type: ignore[method-assign]
    done = kedge("judge", "trust", "judge.yaml", "--on", "human.jsonl", "--repeat", "0")
    assert "2 comparisons could not be asked, and count as unreadable" in done.out
    figures = read_trust(tmp_path / "trust.json").figures
    assert figures["failed"] == 2
    assert figures["readable"]["value"] == pytest.approx(76 / 80)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_files_are_refused_with_line_and_field(case: Case) -> None:
    assert attempt(case) is None


def test_nothing_is_asked_or_overwritten_where_the_command_is_wrong(kedge: Kedge, wired: Wired, tmp_path: Path) -> None:
    people(tmp_path / "human.jsonl")
    judge = wired.set()
    (tmp_path / "trust.json").write_text("mine")
    (tmp_path / "no-key.yaml").write_text("url: http://localhost:1/v1\nmodel: m\nkey_variable: KEDGE_NO_SUCH_KEY\n")
    (tmp_path / "rubric.yaml").write_text("url: http://localhost:1/v1\nmodel: m\nrubric: '{{ first }}'\n")
    same = json.dumps({"prompt": "Why?", "first": "So.", "second": "So.", "verdicts": {"ann": "tie"}})
    (tmp_path / "same.jsonl").write_text(same)
    on = ("--on", "human.jsonl")
    for arguments, words in (
        (("judge.yaml", *on), "trust.json: this file is there already"),
        (("judge.yaml", *on, "--to", "human.jsonl", "--force"), "would be overwritten"),
        (("judge.yaml",), "kedge judge trust JUDGE.yaml --on HUMAN.jsonl"),
        ((*on,), "kedge judge trust JUDGE.yaml --on HUMAN.jsonl"),
        (("judge.yaml", *on, "--verdicts", "human.jsonl"), "or --verdicts FILE"),
        (("nowhere.yaml", *on, "--to", "t.json"), "there is no such judge file"),
        (("judge.yaml", "--on", "nowhere.jsonl", "--to", "t.json"), "there is no such file"),
        (("no-key.yaml", *on, "--to", "t.json"), "KEDGE_NO_SUCH_KEY"),
        (("rubric.yaml", *on, "--to", "t.json"), "judge.rubric"),
        (("judge.yaml", "--on", "same.jsonl", "--to", "t.json"), "both answers are the same in all 1 rows"),
    ):
        done = kedge("judge", "trust", *arguments)
        assert done.code == 2, (arguments, done)
        assert words in done.err
    assert judge.calls == 0
    assert (tmp_path / "trust.json").read_text() == "mine"
    assert not (tmp_path / "t.json").exists()


def test_names_of_others_are_text_on_the_page(kedge: Kedge, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    rows = [
        {"id": n, "prompt": "Why?", "first": "a", "second": "b", "verdicts": {evil: "first", "b": "tie"}}
        for n in (1, 2)
    ]
    (tmp_path / "human.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "s.jsonl").write_text('{"id": 1, "verdict": "tie"}\n')
    assert kedge("judge", "trust", "--verdicts", "s.jsonl", "--on", "human.jsonl").code == 3
    page = (tmp_path / "trust.html").read_text()
    assert "<img" not in page
    assert "&lt;img" in page
