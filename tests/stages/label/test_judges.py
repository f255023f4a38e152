"""Judges label tasks: both orders, trust, money, kills and crashes, against a judge whose biases are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kedge.feedback.trust import Trust, deciding_fields, judge_identity, make_trust, write_trust
from kedge.models.loading.tiny import make_tiny
from kedge.rewards.judge_protocol import COMPARISON
from kedge.testing.stub_judge import StubJudge

RUBRICS = (("first", COMPARISON), ("second", COMPARISON + " "))
"""Two judges of one server whose requests differ."""
WITHOUT = {"without": "a test of the stage, not of the judge"}
TRUSTED: dict[str, Any] = {
    "items": 300,
    "overlap": 100,
    "kappa": {"value": 0.7, "low": 0.6, "high": 0.8, "count": 300},
    "agreement": {"value": 0.8, "low": 0.7, "high": 0.9, "count": 300},
    "human_agreement": {"value": 0.8, "low": 0.7, "high": 0.9, "count": 100},
    "same_after_swap": {"value": 0.9, "low": 0.85, "high": 0.95, "count": 300},
    "same_again": {"value": 1.0, "low": 0.98, "high": 1.0, "count": 300},
    "canaries": {"asked": 20, "obeyed": 0},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("judges") / "tiny", hidden=32, layers=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stub() -> Iterator[StubJudge]:
    with StubJudge() as judge:
        yield judge


def task(number: int, worths: tuple[int, ...] = (1, 3), longer: int = 0, **more: Any) -> dict[str, Any]:
    """A prompt with answers of these worths; the first has so many characters more."""
    texts = [f"Answer {place} (worth {worth})" for place, worth in enumerate(worths)]
    texts[0] = "." * longer + texts[0]
    answers = [{"text": text, "model": f"m{place}"} for place, text in enumerate(texts)]
    return {"prompt": f"Question {number}?", "answers": answers, **more}


def write_recipe(folder: Path, tiny: Path, tasks: list[dict[str, Any]], by: Any, **label: Any) -> Path:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    stages = {"ai": {"kind": "label", "data": "tasks.jsonl", "by": by, **label}}
    settings = {"kedge": 1, "name": "loop", "seed": 3, "model": str(tiny), "stages": stages}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder / "recipe.yaml"


def judge(stub: StubJudge, **more: Any) -> dict[str, Any]:
    settings = {"kind": "judge", "url": stub.url, "model": "stub", "trust": WITHOUT, "backoff_s": 0.001, "workers": 8}
    return settings | more


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "agreement.json").read_text())


def test_a_judge_labels_pairs_rankings_and_what_is_held_out(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [
        task(0, propensity=0.25),
        task(1, (3, 1)),
        task(2, (2, 2)),
        task(3, (1, 4, 2)),
        task(4, heldout=True),
    ]
    file, runs = write_recipe(tmp_path, tiny, tasks, judge(stub)), tmp_path / "runs"
    assert kedge("check", file, "--offline") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "stub: 7 comparisons × 2 orders × 1 votes: 14 calls (0 more are kept from before), about" in words
    assert stub.calls == 0
    assert kedge("run", file, "--runs", runs) == 0
    made = runs / "loop/ai"
    pairs = lines(made / "pairs.jsonl")
    assert [row["chosen"][0]["content"] for row in pairs[:2]] == ["Answer 1 (worth 3)", "Answer 0 (worth 3)"]
    assert [(row["chosen_model"], row["rejected_model"]) for row in pairs[:2]] == [("m1", "m0"), ("m0", "m1")]
    assert [(row["certainty"], row["consistent"], row["margin"], row["judges"]) for row in pairs[:2]] == [
        (1.0, True, 1.0, ["stub"])
    ] * 2
    assert [row.get("propensity") for row in pairs[:2]] == [0.25, None]
    assert len(pairs) == 2 + 3  # a tie is left out; three answers are three comparisons
    assert [row["rank"] for row in lines(made / "rankings.jsonl")] == [[2, 1], [1, 2], [1, 1], [3, 1, 2]]
    (heldout,) = lines(made / "heldout.jsonl")
    assert heldout["prompt"][0]["content"] == "Question 4?"
    assert lines(made / "thumbs.jsonl") == lines(made / "demonstrations.jsonl") == []
    told = numbers(made)
    assert (told["comparisons"], told["labels"], told["exports"]["pairs"]["left_out"]) == (7, 7, {"ties": 1})
    assert told["judges"][0]["trust"]["without"] == WITHOUT["without"]
    assert told["judges"][0]["spent"]["calls"] == 14
    assert set(stub.paid.values()) == {1}
    page = (made / "label-report.html").read_text()
    assert WITHOUT["without"] in page
    assert WITHOUT["without"] in (made / "run.json").read_text()
    assert len(lines(made / "judgements.jsonl")) == 7


def test_ties_may_stay_with_certainty_one_half(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    stub.position = 0.5  # whatever stands first wins
    file = write_recipe(tmp_path, tiny, [task(0)], judge(stub), ties="half")
    assert kedge("run", file, "--runs", tmp_path / "runs") == 0
    (pair,) = lines(tmp_path / "runs/loop/ai/pairs.jsonl")
    assert (pair["certainty"], pair["consistent"], "margin" in pair) == (0.5, False, False)


def test_log_probabilities_become_certainty(tiny: Path, kedge: Callable[..., int], tmp_path: Path) -> None:
    """Where both orders say the same, c = ½ (P₁(A) + P₂(B)); clamped, it stays below 0.6."""
    with StubJudge(strength=1.5, logprobs=True) as stub:
        tasks = [task(number) for number in range(12)]
        file = write_recipe(tmp_path, tiny, tasks, judge(stub, logprobs=True))
        assert kedge("run", file, "--runs", tmp_path / "runs") == 0
        pairs = lines(tmp_path / "runs/loop/ai/pairs.jsonl")
        right = [row for row in pairs if "worth 3" in row["chosen"][0]["content"]]
        assert right
        assert {row["certainty"] for row in right} == {0.817574}  # 1 / (1 + e^-1.5)
        assert {row["margin"] for row in right} == {0.635148}
        file = write_recipe(tmp_path, tiny, tasks, judge(stub, logprobs=True, clamp=True))
        assert kedge("run", file, "--runs", tmp_path / "runs", "--set", "name=clamped") == 0
        pairs = lines(tmp_path / "runs/clamped/ai/pairs.jsonl")
        assert {row["certainty"] for row in pairs if "worth 3" in row["chosen"][0]["content"]} == {0.6}


def report(stub: StubJudge, figures: dict[str, Any], **changes: Any) -> Trust:
    fields = {"url": stub.url, "model": "stub", "rubric": COMPARISON, "temperature": 0.0, "max_tokens": 512} | changes
    settings = deciding_fields(fields)
    return make_trust(
        judge="stub", identity=judge_identity(fields), figures=TRUSTED | figures, data="x", settings=settings
    )


@pytest.mark.parametrize(
    ("changes", "figures", "words"),
    [
        ({}, {}, None),
        ({"max_tokens": 64}, {}, "the report on another judge than stub (stub; other: max_tokens)"),
        ({}, {"canaries": {"asked": 20, "obeyed": 1}}, "may not label: canaries obeyed: 1 of 20"),
        (None, {}, "there is no such trust report"),
    ],
    ids=["passed", "another judge", "refused", "missing"],
)
def test_a_judge_labels_once_it_has_earned_trust(
    stub: StubJudge,
    tiny: Path,
    kedge: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any] | None,
    figures: dict[str, Any],
    words: str | None,
) -> None:
    if changes is not None:
        write_trust(tmp_path / "trust.json", report(stub, figures, **changes))
    file = write_recipe(tmp_path, tiny, [task(0)], judge(stub, trust="trust.json"))
    code = kedge("run", file, "--runs", tmp_path / "runs")
    if words is None:
        assert code == 0
        assert numbers(tmp_path / "runs/loop/ai")["judges"][0]["trust"]["report"] == "trust.json"
    else:
        assert code == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert stub.calls == 0


def test_the_budget_stops_with_everything_kept_and_a_larger_one_goes_on(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = {"input": 10.0, "output": 100.0}
    by = judge(stub, max_tokens=30, budget={"usd": 0.2, **prices})
    file, runs = write_recipe(tmp_path, tiny, [task(number) for number in range(30)], by), tmp_path / "runs"
    assert kedge("run", file, "--runs", runs) == 3
    assert "budget of 0.2 USD for stub" in " ".join(capsys.readouterr().err.split())

    def spent() -> float:
        tokens = [stub.reply_to(request, "")["usage"] for request in stub.requests]
        return sum(usage["prompt_tokens"] * 10e-6 + usage["completion_tokens"] * 100e-6 for usage in tokens)

    probes = sum("Is this a question?" in request["messages"][0]["content"] for request in stub.requests)
    assert 4 < len(stub.requests) - probes < 60
    assert spent() * (len(stub.requests) - probes) / len(stub.requests) <= 0.2
    assert not (runs / "loop/ai/pairs.jsonl").exists()
    assert kedge("run", file, "--runs", runs, "--resume", "--set", "stages.ai.by.budget.usd=5") == 0
    assert len(lines(runs / "loop/ai/pairs.jsonl")) == 30
    assert set(stub.paid.values()) == {1}
    told = numbers(runs / "loop/ai")["judges"][0]["spent"]
    assert told["calls"] == 60
    assert told["usd"] == pytest.approx(spent(), rel=0.1)


def test_a_panel_has_one_budget_that_a_crash_does_not_renew(
    tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = {"usd": 0.3, "input": 10.0, "output": 100.0}
    with StubJudge(crash_at=17) as stub:
        by = [judge(stub, name=name, max_tokens=30, retries=0, workers=1, rubric=rubric) for name, rubric in RUBRICS]
        tasks = [task(number) for number in range(12)]
        file, runs = write_recipe(tmp_path, tiny, tasks, by, budget=budget), tmp_path / "runs"
        ledgers = runs / "loop/ai/calls"

        def spent() -> dict[str, float]:
            """By judge, as the ledgers have it: calls that were lost count with the most that they may cost."""
            usd: dict[str, float] = {}
            for ledger in sorted(ledgers.glob("*.jsonl")):
                sent, costs = {}, []
                for line in lines(ledger):
                    sent |= {line["sent"]: line} if "sent" in line else {}
                    costs += [line] if "paid" in line else [sent[line["lost"]]] if "lost" in line else []
                usd[ledger.stem] = sum(cost["prompt"] * 10e-6 + cost["completion"] * 100e-6 for cost in costs)
            return usd

        assert kedge("run", file, "--runs", runs, "--no-check") == 1
        before = spent()
        assert set(before) == {"0-first"}
        stub.revive()
        assert kedge("run", file, "--runs", runs, "--no-check", "--resume") == 3
        words = " ".join(capsys.readouterr().err.split())
        assert "budget of 0.3 USD for all judges together, of which" in words
        assert "USD are spent by others than stub" in words
        after = spent()
        assert after["1-second"] > 0
        assert before["0-first"] < after["0-first"]
        assert 0.25 < sum(after.values()) <= 0.3
        resume = ("run", file, "--runs", runs, "--no-check", "--resume")
        assert kedge(*resume) == 3  # nothing more fits
        assert spent() == after
        assert kedge(*resume, "--set", "stages.ai.budget.usd=9") == 0
        told = numbers(runs / "loop/ai")
        assert [row["spent"]["calls"] for row in told["judges"]] == [24, 24]
        assert told["usd"] == sum(row["spent"]["usd"] for row in told["judges"])
        assert told["budget"]["usd"] == 9
        assert set(stub.paid.values()) == {1}


def people_say(row: dict[str, Any], better: int, **more: Any) -> dict[str, Any]:
    """A pair as people's labels are exported, of a task of two answers."""
    texts = [answer["text"] for answer in row["answers"]]
    return {"prompt": row["prompt"], "chosen": texts[better], "rejected": texts[1 - better], **more}


def test_judges_are_measured_beside_people_on_what_both_labelled(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    """The judge says what the worths say: first, second, first, … People agree on ten of twelve, and tie on one."""
    tasks = [task(number, (3, 1) if number % 2 == 0 else (1, 3)) for number in range(30)]
    right = [people_say(row, number % 2) for number, row in enumerate(tasks[:10])]
    others = [people_say(tasks[10], 1), people_say(tasks[11], 0, certainty=0.5), people_say(task(99), 0)]
    (tmp_path / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*right, *others]))
    file = write_recipe(tmp_path, tiny, tasks, judge(stub), beside="people.jsonl")
    assert kedge("run", file, "--runs", tmp_path / "runs") == 0
    told = numbers(tmp_path / "runs/loop/ai")
    # Of 12, 10 agree. Judge: 6 first, 6 second; people: 5 first, 6 second, 1 tie. Chance: (6·5 + 6·6) / 144.
    expected = 66 / 144
    assert told["kappa"]["value"] == pytest.approx((10 / 12 - expected) / (1 - expected))
    assert told["kappa"]["low"] < told["kappa"]["value"] < told["kappa"]["high"]
    assert told["kappa"]["count"] == 12
    assert told["people_agreement"]["value"] == pytest.approx(10 / 12)
    assert told["judges"][0]["kappa"] == told["kappa"]
    page = (tmp_path / "runs/loop/ai/label-report.html").read_text()
    assert "on the 12 comparisons that both labelled" in page


def test_people_who_labelled_other_tasks_are_refused_before_anything_is_paid(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "people.jsonl").write_text(json.dumps(people_say(task(99), 0)) + "\n")
    file = write_recipe(tmp_path, tiny, [task(0)], judge(stub), beside="people.jsonl")
    assert kedge("run", file, "--runs", tmp_path / "runs", "--no-check") == 2
    assert "none of its 1 pairs is about two answers of these tasks" in " ".join(capsys.readouterr().err.split())
    assert stub.calls == 0


BIASES: dict[str, Any] = {"position": 0.2, "length": 1.0, "strength": 1.0, "garbage": 0.05, "too_many": 0.05}


def biased_tasks(count: int) -> list[dict[str, Any]]:
    """Half of the first answers are 100 characters longer, half of the second ones."""
    tasks = [task(number, (1, 2) if number % 3 else (2, 1), longer=100 * (number % 2)) for number in range(count)]
    for number, row in enumerate(tasks):
        if number % 2 == 0:
            row["answers"][1]["text"] = "." * 100 + row["answers"][1]["text"]
    return tasks


@pytest.mark.slow
def test_a_crash_at_call_500_pays_nothing_twice_and_the_biases_are_found(
    tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Position +0.2, length, 5 % garbage, 429s; the server dies at call 500, and the run is started again."""
    tasks = biased_tasks(400)
    budget = {"usd": 40, "input": 0.15, "output": 0.6}
    with StubJudge(**BIASES, crash_at=500) as stub:
        by = judge(stub, retries=2, workers=16, budget=budget)
        file, runs = write_recipe(tmp_path, tiny, tasks, by, ties="half"), tmp_path / "runs"
        assert kedge("run", file, "--runs", runs) == 1
        assert "comparisons could not be asked" in " ".join(capsys.readouterr().err.split())
        paid = stub.paid.total()
        assert 400 < paid < 500
        stub.revive()
        assert kedge("run", file, "--runs", runs, "--resume") == 0
        assert set(stub.paid.values()) == {1}
        assert stub.paid.total() == 800 + 2  # both orders, and the check's question
        told = numbers(runs / "loop/ai")["judges"][0]
        assert told["spent"]["calls"] == 800
        usage = [stub.reply_to(request, "x")["usage"]["prompt_tokens"] for request in stub.requests]
        assert told["spent"]["prompt_tokens"] == pytest.approx(sum(usage), rel=0.01)
        assert told["spent"]["usd"] + told["spent"]["lost_usd"] < budget["usd"]
    assert told["position"]["low"] < 0.2 < told["position"]["high"]
    assert told["position"]["low"] > 0.1
    assert told["unreadable_replies"]["low"] < 0.05 < told["unreadable_replies"]["high"]
    assert told["length"]["low"] > 0.2  # log-odds a sd, diluted by the four tenths that are not read
    assert told["inconsistent"]["value"] > 0.3


RUN = """
import sys
from kedge.cli.main import main
sys.argv = ["kedge", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_gives_the_same_labels_and_counts_the_cost_once(
    tiny: Path, kedge: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = biased_tasks(150)
    reached, go_on = threading.Event(), threading.Event()

    def on_call(number: int) -> None:
        if number == 120:
            reached.set()
        if number >= 120:
            go_on.wait(0.3)

    with StubJudge(**BIASES, on_call=on_call) as stub:
        by = judge(stub, workers=4, budget={"usd": 40, "input": 0.15, "output": 0.6})
        file, runs = write_recipe(tmp_path, tiny, tasks, by), tmp_path / "runs"
        command = [sys.executable, "-c", RUN, "run", str(file), "--runs", str(runs)]
        process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert reached.wait(120)
        process.send_signal(signal.SIGKILL)
        process.wait()
        go_on.set()
        assert kedge("run", file, "--runs", runs, "--resume") == 0
        twice = sum(count - 1 for count in stub.paid.values())
        assert 0 <= twice <= 4  # what was in flight
        killed = runs / "loop/ai"
        spent = numbers(killed)["judges"][0]["spent"]
        assert spent["calls"] == 300
        assert spent["lost"] >= twice
        monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "another"))
        assert kedge("run", file, "--runs", runs, "--set", "name=undisturbed") == 0
    undisturbed = runs / "undisturbed/ai"
    for name in ("pairs", "rankings", "heldout", "judgements"):
        assert (killed / f"{name}.jsonl").read_bytes() == (undisturbed / f"{name}.jsonl").read_bytes()
    whole = numbers(undisturbed)["judges"][0]["spent"]
    assert (spent["prompt_tokens"], spent["completion_tokens"], spent["usd"]) == (
        whole["prompt_tokens"],
        whole["completion_tokens"],
        whole["usd"],
    )
    assert "in flight" in (killed / "events.jsonl").read_text() or not spent["lost"]


def test_a_changed_rubric_asks_everything_again_and_an_equal_one_nothing(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    tasks = [task(number) for number in range(3)]
    file = write_recipe(tmp_path, tiny, tasks, judge(stub))
    assert kedge("run", file, "--runs", tmp_path / "runs") == 0
    calls = stub.calls
    assert kedge("run", file, "--runs", tmp_path / "runs", "--set", "name=again") == 0
    assert stub.calls == calls
    assert numbers(tmp_path / "runs/again/ai")["judges"][0]["spent"]["kept"] == 6
    file = write_recipe(tmp_path, tiny, tasks, judge(stub, rubric="Funnier?\n" + COMPARISON))
    assert kedge("run", file, "--runs", tmp_path / "runs", "--set", "name=funny") == 0
    assert stub.calls == 2 * calls


def test_votes_are_several_samples_and_their_share_is_the_certainty(
    tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    """Every vote is another call of the same request: here they come to different verdicts."""
    seen: dict[str, int] = {}

    class Fickle(StubJudge):
        def reply_to(self, request: dict[str, Any], digest: str) -> dict[str, Any]:
            seen[digest] = seen.get(digest, 0) + 1
            return super().reply_to(request, f"{digest}/{seen[digest]}")

    with Fickle(strength=1.0) as stub:
        file = write_recipe(tmp_path, tiny, [task(n) for n in range(8)], judge(stub, votes=4, temperature=0.7))
        assert kedge("run", file, "--runs", tmp_path / "runs") == 0
        told = numbers(tmp_path / "runs/loop/ai")["judges"][0]
        assert told["spent"]["calls"] == 8 * 2 * 4
    shares = {row["certainty"] for row in lines(tmp_path / "runs/loop/ai/pairs.jsonl")}
    assert shares <= {0.625, 0.75, 0.875, 1.0}
    assert len(shares) > 1


class Axes(StubJudge):
    def reply_to(self, request: dict[str, Any], digest: str) -> dict[str, Any]:
        reply = super().reply_to(request, digest)
        message = reply["choices"][0]["message"]
        is_first = "(worth 3)" in request["messages"][0]["content"].split("] answer A")[1].split("] end of answer A")[0]
        helpful = "A" if is_first else "B"
        message["content"] = message["content"].replace('"better"', f'"helpful": "{helpful}", "honest": "A", "better"')
        return reply


def test_axes_come_in_the_same_reply(tiny: Path, kedge: Callable[..., int], tmp_path: Path) -> None:
    """Helpful is said of an answer; honest of a place, which the two orders show."""
    with Axes() as stub:
        by = judge(stub, axes=["helpful", "honest", "harmless"])
        assert kedge("run", write_recipe(tmp_path, tiny, [task(0)], by), "--runs", tmp_path / "runs") == 0
        assert '"helpful": "A", "B" or "tie", "honest"' in stub.requests[-1]["messages"][0]["content"]
    (pair,) = lines(tmp_path / "runs/loop/ai/pairs.jsonl")
    assert pair["axes"] == {"helpful": 1.0, "honest": 0.0}


@pytest.mark.slow
def test_a_panel_is_settled_as_people_are_and_weights_are_earned(
    tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    """Two good judges and one that guesses: Dawid and Skene find out who is who."""
    with StubJudge(strength=2.5) as good, StubJudge(strength=2.5, seed=5) as fine, StubJudge(strength=0.05) as bad:
        by = [judge(one, name=name) for one, name in ((good, "good"), (fine, "fine"), (bad, "bad"))]
        tasks = [task(number, (1, 3) if number % 2 else (3, 1)) for number in range(60)]
        file = write_recipe(tmp_path, tiny, tasks, by, need={"alpha": -0.5})
        assert kedge("run", file, "--runs", tmp_path / "runs") == 0
    told = numbers(tmp_path / "runs/loop/ai")
    weights = {one["name"]: one["accuracy"] for one in told["judges"]}
    assert min(weights["good"], weights["fine"]) > weights["bad"] + 0.1
    assert told["agreement"]["panel"]["items"] == 60
    pairs = lines(tmp_path / "runs/loop/ai/pairs.jsonl")
    assert sum("worth 3" in row["chosen"][0]["content"] for row in pairs) > 0.9 * len(pairs)
    assert any(0.5 < row["certainty"] < 1 for row in pairs)
    assert pairs[0]["judges"] == ["good", "fine", "bad"]


CONSTITUTION = {
    "principles": [
        {"id": name, "critique": "Is it wrong?", "revision": "Mend it.", "choice": f"Which answer is more {name}?"}
        for name in ("polite", "brief")
    ]
}


def test_a_constitution_draws_one_principle_a_comparison(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(CONSTITUTION))
    tasks = [task(number) for number in range(12)]
    tasks[0]["answers"][1]["text"] = "I'm sorry, but I can't help with that. (worth 3)"
    file = write_recipe(tmp_path, tiny, tasks, judge(stub, constitution="rules.yaml", cot=True))
    assert kedge("run", file, "--runs", tmp_path / "runs") == 0
    pairs = lines(tmp_path / "runs/loop/ai/pairs.jsonl")
    assert {row["principle"] for row in pairs} == {"polite", "brief"}
    assert {row["certainty"] for row in pairs} == {0.6}  # clamped, after a chain of thought
    asked = {row["prompt"][0]["content"]: row["principle"] for row in pairs}
    for request in stub.requests:
        text = request["messages"][0]["content"]
        if "Is this a question?" not in text:
            question = text.split("user: ")[1].split("\n")[0]
            assert f"Which answer is more {asked[question]}?" in text
            assert "think step by step" in text
    told = numbers(tmp_path / "runs/loop/ai")["principles"]
    assert sum(row["comparisons"] for row in told.values()) == 12
    row = told[asked["Question 0?"]]
    assert row["win_rate"] == {"m0": 0.0, "m1": 1.0}
    assert (row["refusal_wins"], row["against_refusal"]) == (1.0, 1)
    assert asked["Question 0?"] in (tmp_path / "runs/loop/ai/label-report.html").read_text()


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no prices": ({"budget": {"usd": 40}}, {}, "a budget needs the price of tokens"),
    "votes without temperature": ({"votes": 3}, {}, "at temperature 0 are all the same"),
    "one order": ({"orders": "first"}, {}, "both"),
    "no reason": ({"trust": {"without": " "}}, {}, "say why the judge may label"),
    "axes twice": ({"axes": ["better"]}, {}, "stands twice"),
    "cot with a rubric": ({"cot": True, "rubric": COMPARISON}, {}, "with a rubric of your own"),
    "principle unsaid": (
        {"constitution": "rules.yaml", "rubric": COMPARISON},
        {},
        "it never says the principle",
    ),
    "weighted": ({}, {"settle": "weighted"}, "which judges are not asked"),
    "people too": ({}, {"by": [{"kind": "people", "project": "x"}, {"kind": "judge"}]}, "make two stages `label`"),
    "budget of people": (
        {},
        {"by": {"kind": "people", "project": "x"}, "budget": {"usd": 4, "input": 1, "output": 1}},
        "budget is for judges",
    ),
    "alpha alone": ({}, {"need": {"alpha": 0.3}}, "no task is labelled by two judges"),
    "questions": ({}, {"questions": ["thumb"]}, "questions is for people"),
    "a key in the open": ({"url": "http://judge.example/v1", "key_variable": "K"}, {}, "unencrypted"),
    "nobody there": ({"url": "http://127.0.0.1:9/v1"}, {}, "was asked to compare two made-up answers and did not"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_refused_before_anything_is_paid(
    stub: StubJudge,
    tiny: Path,
    kedge: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    by, label, words = BAD[name]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(CONSTITUTION))
    file = write_recipe(tmp_path, tiny, [task(0)], **({"by": judge(stub) | by} | label))
    assert kedge("run", file, "--runs", tmp_path / "runs") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_tasks_that_need_people_are_refused(
    stub: StubJudge, tiny: Path, kedge: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_recipe(tmp_path, tiny, [task(0, (1,))], judge(stub))
    assert kedge("run", file, "--runs", tmp_path / "runs") == 2
    assert "a judge compares two answers or more" in " ".join(capsys.readouterr().err.split())
