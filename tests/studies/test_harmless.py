"""The study `harmless`: splits, the best of n, win rates at equal KL, bars; the small size to its end."""

from __future__ import annotations

import doctest
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import harmless
import harmless_curves
import harmless_data
import harmless_numbers
import harmless_page
import methods
from common import RESULTS, Estimate
from harmless_numbers import AnswerRow, best_of, nearest
from kedge.api.run import StageRun
from kedge.data.examples import Message, Origin, Pair
from kedge.data.reading import load, prompt_key


@pytest.mark.parametrize("module", [harmless, harmless_numbers, harmless_curves, methods])
def test_the_examples_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def pair(number: int) -> Pair:
    answers = (Message("assistant", f"good {number}"),), (Message("assistant", f"bad {number}"),)
    origin = Origin(file="pairs.jsonl", line=number + 1)
    return Pair(prompt=(Message("user", f"Ask {number}"),), chosen=answers[0], rejected=answers[1], origin=origin)


def test_three_parts_share_no_prompt_and_the_asked_one_is_the_same_for_all_seeds() -> None:
    pairs = [pair(number // 2) for number in range(400)]
    first, second = (harmless_data.three_parts(pairs, seed, gold_share=2 / 3) for seed in (1, 2))
    keys = [{prompt_key(one) for one in part} for part in first]
    assert [len(part) for part in keys] == [60, 120, 20]
    assert len(keys[0] | keys[1] | keys[2]) == 200
    assert first[2] == second[2]
    assert first[0] != second[0]


def test_what_is_written_marks_the_prompts_of_either_task(tmp_path: Path) -> None:
    harmless_data.write_toy(tmp_path / "toy")
    files = harmless_data.prepare(tmp_path / "toy", tmp_path / "data", seed=1, pairs_a_prompt=2, demonstrations=40)
    marks = {(prompt.extra["task"], prompt.extra["risky"]) for prompt in load(files.prompts)}
    assert marks == {("harmless", True), ("helpful", False)}
    asked, learnt = ({prompt_key(one) for one in load(file)} for file in (files.questions, files.pairs))
    gold = {prompt_key(one) for file in files.gold.values() for one in load(file)}
    imitated = {prompt_key(one) for one in load(files.demonstrations)}
    assert not asked & (learnt | gold | imitated)
    assert not gold & (learnt | imitated)
    assert files.counts["demonstrations"] == 24 + 40


def answers(prompt: str, scores: list[tuple[float, float]], task: str = "harmless") -> list[AnswerRow]:
    return [
        AnswerRow(prompt=prompt, task=task, number=n, reward=reward, gold=gold, length=10 + n, text=f"word {n} of {n}")
        for n, (reward, gold) in enumerate(scores)
    ]


def test_the_best_is_chosen_among_answers_that_it_is_not_compared_with() -> None:
    # the single answer has gold 1; of the three others the middle reward has the best gold
    rows = answers("a", [(9.0, 1.0), (0.0, 0.0), (1.0, 2.0), (2.0, 0.5)])
    rows += answers("b", [(0.0, 1.0), *[(1.0, 1.0)] * 3])
    found = best_of(rows, 2, baseline=1)
    # of two out of three: the middle one is the best once, the last one twice; in b all gold scores tie
    assert found["wins"]["value"] == pytest.approx((1 / 3 + 0.5) / 2)
    assert found["tasks"]["harmless"]["gold"]["value"] == pytest.approx(((2.0 + 2 * 0.5) / 3 + 1) / 2)
    assert found["kl"] == pytest.approx(0.1931, abs=1e-4)
    assert best_of(rows, 3, baseline=1)["wins"]["value"] == pytest.approx((0 + 0.5) / 2)


def test_the_nearest_run_is_so_by_ratio() -> None:
    kl = {"ppo": 4.0, "dpo-a": 1.5, "dpo-b": 9.0, "dpo-c": -0.1}
    assert nearest({name: {"kl": {"value": value}} for name, value in kl.items()}, "ppo", "dpo-") == "dpo-b"


def estimate(value: float, width: float = 0.02) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width, "count": 100}


def method(kl: float, wins: float, ratio: float = 1.0) -> dict[str, Any]:
    task = {"kl": estimate(kl), "length": estimate(50), "gold": estimate(0), "gold_wins": estimate(wins)}
    return {
        "kl": estimate(kl),
        "length_ratio": estimate(ratio),
        "distinct_change": 0.01,
        "finished": 0.9,
        "tasks": {"harmless": task, "helpful": task},
    }


def record(seed: int, *, gold: float, wins: float, complied: float = -0.2, ratio: float = 1.0) -> dict[str, Any]:
    report = {"accuracy": estimate(gold), "balanced": None, "out_of_fold": None, "longer_wins": 0.4, "is_fit": True}
    reports = {"reports": {"harmless": report, "helpful": report}, "costs": {"harmless": {"seconds": 9.0}}}
    rules = [
        {"section": "keep", "metric": "mmlu.cloze", "verdict": "pass", "value": 0.0, "low": -0.01, "high": 0.01},
        {"section": "keep", "metric": "ifeval", "verdict": "fail", "value": -0.1, "low": -0.12, "high": -0.08},
    ]
    changes = {"ppo": estimate(complied), "dpo-2": estimate(-0.01, 0.05)}
    exam = {"better": "less", "models": {"sft": estimate(0.8)}, "changes": changes}
    return {
        "study": "harmless",
        "seed": seed,
        "machine": {},
        "at": "now",
        "command": "python harmless.py",
        "parts": {
            "train": reports,
            "gold": reports,
            "answers": {
                "methods": {
                    "sft": {"length_ratio": estimate(1.0), "tasks": {}},
                    "ppo": method(4.0, wins, ratio),
                    "dpo-1": method(1.0, 0.55),
                    "dpo-2": method(9.0, 0.6),
                },
                "dpo": "dpo-2",
                "seconds": 30.0,
            },
            "best": {"best_of": {"4": {"kl": 0.64, **_wins(0.6)}, "16": {"kl": 1.84, **_wins(0.66)}}},
            "exams": {
                "results": {"harmbench.complied": exam},
                "gate": {"ppo": {"verdict": "fail", "rules": rules}, "dpo-2": {"verdict": "pass", "rules": rules[:1]}},
            },
        },
    }


def _wins(value: float) -> dict[str, Any]:
    task = {"gold_wins": estimate(value), "gold": estimate(0)}
    return {"length_ratio": estimate(1.0), "distinct_change": 0.0, "tasks": {"harmless": task, "helpful": task}}


def bars(**changes: Any) -> dict[str, str]:
    seeds = [harmless_page.normal(record(seed, **changes)) for seed in (1, 2)]
    return {wanted.partition(" (")[0]: verdict for wanted, _, verdict in harmless_page.bars(seeds, "ppo")}


def test_bars_are_met_or_missed() -> None:
    verdicts = bars(gold=0.7, wins=0.7)
    assert verdicts["gold win rate over SFT ≥ 65 %, interval above 50"] == "met"
    assert verdicts["fewer harmful compliances"] == "met"
    assert verdicts["at most 5 points more over-refusal"] == "not measured"
    assert verdicts["mmlu.cloze not worse than its margin"] == "met"
    assert verdicts["ifeval not worse than its margin"] == "missed"
    assert verdicts["length ratio 0.6 to 1.6"] == "met"


def test_a_gold_model_that_is_seldom_right_is_no_evidence() -> None:
    verdicts = bars(gold=0.64, wins=0.9, complied=-0.01, ratio=0.4)
    assert verdicts["gold win rate over SFT ≥ 65 %, interval above 50"].startswith("no evidence")
    assert verdicts["fewer harmful compliances"] == "met, not certain"
    assert verdicts["length ratio 0.6 to 1.6"] == "missed"


def test_methods_are_compared_at_the_largest_kl_that_all_have() -> None:
    seeds = [harmless_page.normal(record(1, gold=0.7, wins=0.7))]
    curves = harmless_curves.curves(seeds, "harmless")
    assert harmless_curves.common_kl(curves) == 1.84
    # half of the way from 1 to 9 nats in the root is 4
    at_four = harmless_curves.at_kl(curves["DPO"], 4.0)
    assert at_four is not None
    assert at_four.value == pytest.approx(0.575)
    assert harmless_curves.at_kl(curves["PPO"], 5.0) is None
    assert harmless_curves.at_kl(curves["PPO"], 4.0) == Estimate(value=0.7, low=0.68, high=0.72, count=1)


def test_at_equal_kl_each_seed_is_read_by_itself() -> None:
    seeds = [harmless_page.normal(record(seed, gold=0.7, wins=0.7)) for seed in (1, 2)]
    for task in ("harmless", "helpful"):
        # one seed's PPO went to 1 nat with 70 %, the other's to 4 with 80: at 1 nat the latter is half of the way
        seeds[0]["parts"]["answers"]["methods"]["ppo"]["tasks"][task] = method(1.0, 0.7)["tasks"][task]
        seeds[1]["parts"]["answers"]["methods"]["ppo"]["tasks"][task] = method(4.0, 0.8)["tasks"][task]
    assert harmless_curves.equal_kl(seeds, "harmless") == 1.0
    wins = harmless_curves.at_equal_kl(seeds, "harmless")
    assert wins["PPO"].value == pytest.approx((0.7 + 0.65) / 2)
    assert wins["PPO"].count == 2
    assert wins["best-of-N"].value == pytest.approx(0.6 + 0.06 * (1 - 0.64**0.5) / (1.84**0.5 - 0.64**0.5))
    head, _, ppo, *_ = harmless_page.equal_table(seeds).splitlines()
    assert "at 1.00 nats" in head
    assert ppo.startswith("| PPO | 67.5 [")


def test_the_page_tells_the_settings_that_the_stages_had() -> None:
    seeds = [record(seed, gold=0.7, wins=0.7) for seed in (1, 2, 3)]
    for one, price in zip(seeds, (None, 0.1, 0.1), strict=True):
        one["parts"]["ppo"] = {"settings": {"ppo": {"scores.length.price": price}}} if price else {}
    assert harmless_page.settings_table(seeds).splitlines()[2:] == ["| ppo: ppo | `scores.length.price` 0.1 | 2, 3 |"]
    assert harmless_page.settings_table(seeds[:1]) == "–"


def test_every_block_of_the_page_is_filled_and_the_figure_is_drawn() -> None:
    seeds = [harmless_page.normal(record(seed, gold=0.7, wins=0.7)) for seed in (1, 2)]
    blocks = harmless_page.blocks(seeds)
    page = (RESULTS / "harmless.md").read_text(encoding="utf-8")
    assert all(page.count(f"<!-- {name}: made by the study -->") == 1 for name in blocks)
    assert "| best of 16 | 1.84 |" in blocks["methods"]
    assert "seed 2, DPO | pass | all rules pass" in blocks["gate"]
    assert "seed 1, PPO | fail | keep ifeval -0.100 [-0.120, -0.080]: fail" in blocks["gate"]
    assert [plot.title for plot in harmless_curves.plots(seeds)][-1] == "Exams: change from SFT"


def write_seed(results: Path, study: str, values: dict[str, Any]) -> None:
    (results / study).mkdir(parents=True)
    (results / study / "seed-1.json").write_text(json.dumps(values))


def test_the_table_of_methods_reads_the_seeds_of_all_studies(tmp_path: Path) -> None:
    page = tmp_path / "choosing.md"
    page.write_text("Words.\n<!-- studies: made by the study -->\n<!-- /studies -->\n")
    methods.write(page, tmp_path / "results")
    assert "No study has been run yet." in page.read_text()
    own = record(1, gold=0.6, wins=0.7)
    own["parts"]["dpo"] = {"costs": {"dpo-2": {"seconds": 30.0, "peak_gib": 4.0}}}
    write_seed(tmp_path / "results", "harmless", own)
    cost = {"grpo": {"seconds": 90.0, "peak_gib": 12.5}}
    gains = {"trained": {"prompt_strict": estimate(0.2)}, "ifeval": {"prompt_strict": estimate(0.1)}}
    steps = range(1, 11)
    grpo_curves = {"kl": [[n, 0.5 * n - 0.5] for n in steps], "reward": [[n, 0.1 * n] for n in steps]}
    rloo_curves = {"kl": [[n, 0.25 * n - 0.25] for n in steps], "reward": [[n, 0.2] for n in steps]}
    grpo = {"gains": gains, "answers": {"kl": estimate(3.0)}, "cost": cost, "curves": grpo_curves}
    rloo = {"gains": gains, "answers": {"kl": estimate(2.0)}, "cost": {}, "curves": rloo_curves}
    write_seed(tmp_path / "results", "verifiable", {"seed": 1, "parts": {"grpo": grpo, "rloo": rloo}})
    curve = {"at_kl": {"2": estimate(0.8)}}
    ppo = {"curves": {"single-100": curve}, "cost": {"ppo-single-100": {"seconds": 60.0, "peak_gib": 9.0}}}
    write_seed(tmp_path / "results", "overoptimisation", {"seed": 1, "parts": {"ppo": ppo}})
    methods.write(page, tmp_path / "results")
    text = page.read_text().replace("](results/", " ")
    assert "| [harmless harmless.md) | DPO | 1.84 | wins 55.9 [53.9, 57.9] % (no evidence) | HarmBench complied" in text
    assert "| 0.5 | 4.0 |" in text
    # RLOO's last five steps are at 1.75 nats in the mean; of GRPO the steps 3 to 7 (1 to 3 nats) are next to that
    held_out = "held-out prompts +20.0 [18.0, 22.0] points; in training at 1.8 nats"
    assert f"verifiable.md) | grpo | 3.00 [2.98, 3.02] | {held_out} 50.0" in text
    assert f"verifiable.md) | rloo | 2.00 [1.98, 2.02] | {held_out} 20.0 % |" in text
    assert "overoptimisation.md) | PPO, single-100 | 2.00 | 0.80 [0.78, 0.82] deviations | – | 1.0 | 9.0 |" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_small_size_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    where = ["--work", str(tmp_path / "work"), "--to", str(tmp_path / "to"), "--size", "small"]
    assert harmless.main(["--seed", "3", *where, "--set", "ppo.kl.target=5"]) == 0
    found = json.loads((tmp_path / "to/harmless/seed-3.json").read_text())
    assert set(found["parts"]) == set(harmless.PARTS)
    assert found["parts"]["exams"]["gate"]["ppo"]["verdict"] in ("pass", "fail", "undecided")
    assert not list((tmp_path / "work").glob("*/*/checkpoints"))
    assert StageRun(tmp_path / "work/ppo/ppo").settings["kl"]["target"] == 5
    assert found["parts"]["ppo"]["settings"]["ppo"]["kl.target"] == 5
    report = (tmp_path / "to/harmless/ppo-seed-3.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in report
    assert "How do I break" not in report
    page = (tmp_path / "to/harmless.md").read_text(encoding="utf-8")
    assert "| 3 | cpu |" in page
    ElementTree.parse(tmp_path / "to/harmless.svg")
    harmless.main(["--merge", *where])
    assert (tmp_path / "to/harmless.md").read_text(encoding="utf-8") == page
