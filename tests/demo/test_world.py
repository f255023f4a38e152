"""The demo's data: the same for a seed, disjoint by prompt, with the noise and the weak spots that it says it has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.core.answers import Answer
from kedge.core.errors import DataError
from kedge.demo import world
from kedge.demo.recipe import GOLD
from kedge.demo.truth import read_reply, true_preference
from kedge.demo.world import Sizes, best_accuracy, make, score, write
from kedge.rewards.build import text_source
from kedge.rewards.context import RewardContext
from kedge.rewards.settings import FunctionSource

SIZES = Sizes(demonstrations=1500, pairs=2000, prompts=300, heldout=100)
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make(3, SIZES)


def prompts_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][0]["content"] if "messages" in row else row["prompt"] for row in rows]


def test_the_same_seed_gives_the_same_files_and_another_one_others(tmp_path: Path) -> None:
    small = Sizes(demonstrations=20, pairs=20, prompts=5, heldout=5)
    first, again, other = (write(tmp_path / name, seed, small) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert {name: len(path.read_text().splitlines()) for name, path in first.items()} == {
        "demonstrations": 20,
        "pairs": 20,
        "prompts": 5,
        "heldout-prompts": 5,
    }
    for name, path in first.items():
        assert path.read_bytes() == again[name].read_bytes() != other[name].read_bytes()


def test_no_prompt_stands_twice_in_all_the_files_of_the_demo() -> None:
    texts = [text for rows in make(1).values() for text in prompts_of(rows)]
    assert len(texts) == 12_000 + 4800 + 2000 + 200
    assert len(set(texts)) == len(texts)


def test_one_label_in_ten_is_flipped(rows: Rows) -> None:
    """200 of 2,000 are expected; four standard deviations are 54."""
    right = sum(
        true_preference(r["prompt"], r["chosen"]) > true_preference(r["prompt"], r["rejected"]) for r in rows["pairs"]
    )
    assert right == pytest.approx(1800, abs=54)
    assert best_accuracy(rows["pairs"]) == right / 2000


def test_the_labels_do_not_change_which_replies_are_compared(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "LABEL_NOISE", 0.0)
    clean = make(3, SIZES)["pairs"]
    assert best_accuracy(clean) == 1.0
    for noisy, plain in zip(rows["pairs"], clean, strict=True):
        assert {noisy["chosen"], noisy["rejected"]} == {plain["chosen"], plain["rejected"]}


def test_compared_replies_differ_by_at_least_half_a_point(rows: Rows) -> None:
    gaps = [
        abs(true_preference(r["prompt"], r["chosen"]) - true_preference(r["prompt"], r["rejected"]))
        for r in rows["pairs"]
    ]
    assert min(gaps) >= 0.5


def test_the_weak_spots_are_where_the_documentation_says(rows: Rows) -> None:
    replies = [(row["prompt"], row[side]) for row in rows["pairs"] for side in ("chosen", "rejected")]
    readings = [read_reply(*reply) for reply in replies]
    assert max(reading.counts["courtesy"] for reading in readings) == 2
    wrong = sum(list(reading.facts.values()).count("wrong") for reading in readings)
    assert 0 < wrong < 0.02 * 3 * len(readings)
    shown = [read_reply(*(message["content"] for message in row["messages"])) for row in rows["demonstrations"]]
    fawning = sum(reading.counts["courtesy"] > 2 for reading in shown)
    assert fawning == pytest.approx(60, abs=31)  # 4 % of 1,500; four standard deviations


def test_demonstrations_are_readable_and_mediocre(rows: Rows) -> None:
    readings = [read_reply(*(message["content"] for message in row["messages"])) for row in rows["demonstrations"]]
    scores = [true_preference(*(message["content"] for message in row["messages"])) for row in rows["demonstrations"]]
    assert not any(reading.counts["nonsense"] or not reading.is_finished for reading in readings)
    assert 1.5 < sum(scores) / len(scores) < 2.0
    assert max(scores) == 5.0


def test_the_audit_finds_nothing_worse_than_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write(tmp_path, 2, Sizes(demonstrations=3000, pairs=3000, prompts=500, heldout=200))
    files = [paths[name] for name in ("demonstrations", "pairs", "prompts")]
    command = ["kedge", "data", "check", *files, "--heldout", paths["heldout-prompts"]]
    monkeypatch.setattr(sys, "argv", [str(part) for part in command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "checks passed" in printed
    assert "warning" not in printed
    assert "fatal" not in printed


def test_a_perfect_judge_of_no_pairs_is_not_known() -> None:
    with pytest.raises(DataError, match="no pairs"):
        best_accuracy([])


def test_the_truth_is_a_reward_function(message: str, tmp_path: Path) -> None:
    """Read from the file that the recipe names, as a run would."""
    (tmp_path / "gold.py").write_text(GOLD)
    source = text_source(FunctionSource(kind="function", path="gold.py:score"), RewardContext(folder=tmp_path, seed=0))
    prompt = (("user", "Good morning."), ("assistant", "Hello."), ("user", message))
    good = Answer(prompt=prompt, text="For the kettle of order 107 you get a refund.", is_finished=True)
    rude = Answer(prompt=prompt, text="Do not write again.", is_finished=True)
    assert source.score([good, rude]) == [3.0, -2.0]
    assert score(good) == 3.0
