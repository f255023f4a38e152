"""What the demo claims, at its full size: PPO beats SFT by the truth within its KL budget; let go, the truth falls.

`python benchmarks/demo_seeds.py` prints the table of all five seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kedge.commands.demo import run_demo
from kedge.demo.truth import read_reply
from kedge.demo.world import best_accuracy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("seed", [1, 2])
def test_ppo_beats_sft_by_the_truth_within_its_budget(tmp_path: Path, seed: int) -> None:
    home = run_demo(tmp_path, seed, tell=lambda _, __: None)

    answers = [answer for answer in records(home / "eval/answers.jsonl") if answer["model"] == "sft"]
    readings = [read_reply(answer["prompt"][-1]["content"], answer["answer"]) for answer in answers]
    assert sum(reading.counts["nonsense"] > 0 for reading in readings) < 0.12 * len(answers)
    assert sum("wrong" in reading.facts.values() for reading in readings) < 0.06 * len(answers)
    assert 1.1 < fmean(answer["scores"]["gold"] for answer in answers) < 2.2

    report = json.loads((home / "reward/reward-report.json").read_text())
    heldout = [
        {side: turns[-1]["content"] for side, turns in row.items()}
        for row in records(home / "prepare/data/heldout.jsonl")
    ]
    assert report["pairs"] == len(heldout) == 800
    assert report["is_fit"]
    assert report["accuracy"]["value"] > best_accuracy(heldout) - 0.03

    evaluation = json.loads((home / "eval/evaluation.json").read_text())
    assert evaluation["prompts"] == 200
    assert evaluation["comparisons"]["ppo"]["gold"]["win_rate"]["rate"] >= 0.70
    assert max(row["kl/mean"] for row in records(home / "ppo/metrics.jsonl")) <= 6.0
    events = [
        event
        for stage in ("prepare", "sft", "reward", "ppo", "eval")
        for event in records(home / stage / "events.jsonl")
    ]
    assert [event for event in events if event["level"] == "fatal" or event["code"] == "kl.rollback"] == []


def test_let_go_the_truth_falls_from_its_peak_and_an_event_and_the_fit_say_so(tmp_path: Path) -> None:
    lines: list[str] = []
    home = run_demo(tmp_path, 1, tell=lambda text, _: lines.append(text), version="overoptimised")
    metrics = records(home / "ppo/metrics.jsonl")
    gold = [fmean(row["gold/mean"] for row in metrics[at : at + 5]) for at in range(len(metrics) - 4)]
    assert max(gold) > gold[0] + 1
    assert gold[-1] < max(gold) - 3
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 5
    falls = [event for event in records(home / "ppo/events.jsonl") if event["code"] == "reward.gold_falls"]
    assert falls
    assert any(falls[0]["message"] in line for line in lines)
    assert any(f"reward.gold_falls ({falls[0]['step']})" in line for line in lines if line.startswith("The detectors"))
    assert any("The truth was best at iteration" in line and "while the proxy rose by" in line for line in lines)
    assert any(
        line.startswith("The law of Gao et al. (2022), fitted to it: the truth peaks at a KL of") for line in lines
    )
    assert "past the peak" in (home / "report.html").read_text()
