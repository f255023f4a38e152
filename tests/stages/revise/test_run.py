"""The stage on a tiny model: what becomes data, what is left out and why, and what is paid."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stages.revise.conftest import REFUSAL, StubCritic, rows_of

from kedge.core.errors import ContractStop, DataError, RewardError
from kedge.data.reading import read
from kedge.stages.revise import chains

Start = Callable[..., Path]
OUTPUTS = ("demonstrations.jsonl", "pairs.jsonl", "heldout.jsonl", "revisions.jsonl")


def by(critic: StubCritic, **more: Any) -> dict[str, Any]:
    return {"url": critic.url, "model": "stub", "retries": 0, "workers": 2} | more


def way(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"].split()[-1]


def test_what_is_left_out_is_counted_with_its_reason(start: Start, critic: StubCritic) -> None:
    judge = {"kind": "judge", "url": critic.url, "model": "judge"}
    folder = start(by=by(critic), judge=judge)
    rows = rows_of(folder / "revisions.jsonl")
    reasons = {(way(row), row["safe"], row["left_out"]) for row in rows}
    assert reasons == {
        ("polite", True, None),
        ("unchanged", True, "unchanged"),
        ("empty", True, "empty"),
        ("evasive", True, "evasive"),
        ("evasive", False, None),  # a refusal may be right where the prompt is not safe
        ("worse", True, "judged_worse"),
    }
    numbers = json.loads((folder / "revisions.json").read_text())
    assert numbers["left_out"] == {"empty": 2, "unchanged": 2, "evasive": 1, "judged_worse": 2}
    assert (numbers["prompts"], numbers["kept"], numbers["safe"]) == (12, 5, 11)
    refused = [row["last"] for row in rows if row["refusal"]["last"] != "none"]
    assert refused.count(REFUSAL) == 2
    assert numbers["change"]["refused_last"] == pytest.approx(len(refused) / 12)
    page = (folder / "revise-report.html").read_text()
    assert "the last revision refuses, and the prompt is safe" in page
    assert ">rude</td><td>overall" in page


def test_every_step_is_kept_with_its_principle(start: Start, critic: StubCritic) -> None:
    folder = start(by=by(critic), times=3)
    rows = rows_of(folder / "revisions.jsonl")
    assert {len(row["steps"]) for row in rows} == {3}
    drawn = Counter(step["principle"] for row in rows for step in row["steps"])
    assert set(drawn) == {"rude", "plain"}
    numbers = json.loads((folder / "revisions.json").read_text())
    assert {report["id"]: report["steps"] for report in numbers["principles"]} == drawn
    for row in rows:
        assert row["steps"][0]["critique"] == "Well."
        assert row["last"] == (row["steps"][-1]["revision"] or row["first"])


def test_the_last_revision_is_the_demonstration_and_beats_the_first_answer(start: Start, critic: StubCritic) -> None:
    folder = start(by=by(critic), heldout=0.5)
    kept = [row for row in rows_of(folder / "revisions.jsonl") if row["left_out"] is None]
    learnt, held_out = ([row for row in kept if row["heldout"] == is_held] for is_held in (False, True))
    assert learnt
    assert held_out
    demonstrations = rows_of(folder / "demonstrations.jsonl")
    assert [row["messages"][-1]["content"] for row in demonstrations] == [row["last"] for row in learnt]
    for name, own in (("pairs", learnt), ("heldout", held_out)):
        pairs = rows_of(folder / f"{name}.jsonl")
        assert [(row["chosen"], row["rejected"]) for row in pairs] == [(row["last"], row["first"]) for row in own]
        assert all(len(row["principles"]) == 2 for row in pairs)
    assert len(list(read(str(folder / "demonstrations.jsonl"), kind="demonstrations"))) == len(learnt)
    assert len(list(read(str(folder / "pairs.jsonl"), kind="pairs"))) == len(learnt)


def test_without_an_endpoint_the_model_itself_criticises(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start(safe=False)
    rows = rows_of(folder / "revisions.jsonl")
    assert all(step["critique"] for row in rows for step in row["steps"])
    assert {row["left_out"] for row in rows} <= {None, "empty"}
    monkeypatch.setattr(chains, "PIECE", 5)
    monkeypatch.setattr("kedge.stages.revise.run.PIECE", 5)
    other = start(place="other", safe=False)
    assert rows == rows_of(other / "revisions.jsonl")  # an answer depends on no other row


def test_what_does_not_fit_the_window_is_left_out(start: Start) -> None:
    with pytest.raises(DataError, match="12: a request left no room for a reply"):
        start(**{"from": "narrow"})


def test_equal_output_after_a_crash_and_no_call_paid_twice(start: Start, critic: StubCritic, tmp_path: Path) -> None:
    whole = start(by=by(critic))
    paid, critic.calls = dict(critic.paid), 0
    critic.paid.clear()
    critic.crash_at = 17
    with pytest.raises(RewardError, match=r"failures.max_share.*--resume"):
        start(place="broken", by=by(critic))
    critic.revive()
    broken = start(place="broken", by=by(critic))
    assert dict(critic.paid) == paid
    for name in OUTPUTS:
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    costs = [json.loads((folder / "revisions.json").read_text())["spent"]["by"] for folder in (whole, broken)]
    assert [cost["calls"] for cost in costs] == [len(paid)] * 2


def test_a_budget_stops_with_everything_kept_and_a_larger_one_goes_on(start: Start, critic: StubCritic) -> None:
    prices = {"input": 1e4, "output": 1e4}  # 0.15 USD a call of 10 and 5 tokens
    with pytest.raises(ContractStop, match=r"budget of 10 USD"):
        start(by=by(critic, max_tokens=16, budget={"usd": 10, **prices}))
    paid = sum(critic.paid.values())
    assert 0 < paid < 48
    folder = start(by=by(critic, max_tokens=16, budget={"usd": 1e4, **prices}))
    assert set(critic.paid.values()) == {1}
    spent = json.loads((folder / "revisions.json").read_text())["spent"]["by"]
    assert spent["usd"] == pytest.approx(0.15 * sum(critic.paid.values()))


def test_a_record_that_is_neither_safe_nor_unsafe_is_refused(start: Start, critic: StubCritic) -> None:
    folder = start(by=by(critic), safe={"field": "unknown", "default": True})
    assert all(row["safe"] for row in rows_of(folder / "revisions.jsonl"))
    folder = start(place="none", by=by(critic), safe="unknown")
    assert REFUSAL in {row["last"] for row in rows_of(folder / "revisions.jsonl") if row["left_out"] is None}
    assert "no prompt is called safe" in (folder / "events.jsonl").read_text()


def test_where_nothing_is_left_it_says_why(start: Start, critic: StubCritic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubCritic, "revision", lambda self, way, answer: answer)
    with pytest.raises(DataError, match=r"no revision is left to learn from .*the last revision is the first answer"):
        start(by=by(critic))
