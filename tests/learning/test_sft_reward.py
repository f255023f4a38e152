"""SFT, then a reward model, on the toy shop whose rule of preference is known: how near they come to the best possible.

The model reads whole words and starts from larger random weights than usual, so that it learns in seconds to look up
in the prompt what an answer claims. Without that, a judge of the toy's answers is right in 80 % and never in more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.testing import toy

RECIPE = """
kedge: 1
name: shop
seed: 1
model: ./words
stages:
  sft:
    kind: sft
    data: demonstrations.jsonl
    batch: 16
    micro_batch: 16
    max_length: 64
    samples: 0
    optimiser: {lr: 5e-3, beta2: 0.98}
  reward:
    kind: reward
    from: sft
    data: pairs.jsonl
    heldout: heldout.jsonl
    batch: 16
    micro_batch: 16
    max_length: 64
    if_unfit: go_on
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: RATE, beta2: 0.98}
"""


def says_the_fact(row: dict[str, str]) -> bool:
    """Both answers give the asked fact, so that the better one can be told without looking it up."""
    topic = next(one for one in toy.TOPICS if row["prompt"].endswith(one.questions))
    (value,) = [value for value in topic.values if re.search(rf"\b{topic.states.format(value)}\b", row["prompt"])]
    return all(re.search(rf"\b{value}\b", row[side]) for side in ("chosen", "rejected"))


def is_as_the_rule_says(row: dict[str, str]) -> bool:
    return toy.true_score(row["prompt"], row["chosen"]) > toy.true_score(row["prompt"], row["rejected"])


@pytest.fixture
def train(
    kedge: Callable[..., int], rows: Callable[..., Path], tmp_path: Path, make_words: Callable[..., None]
) -> Callable[..., tuple[float, float]]:
    """Run the recipe on these pairs; gives the accuracy on the held-out ones, and the best that any judge can have.

    A flipped label is right by no rule, so the best is the share of held-out labels that were not flipped: counted on
    these very pairs, because the share itself is uncertain by a point and more on a few thousand.
    """

    def run(pairs: list[dict[str, str]], *, heldout: int, layers: int, rate: float) -> tuple[float, float]:
        make_words(tmp_path / "words", layers=layers)
        rows("demonstrations.jsonl", toy.demonstrations(6400, 1))
        rows("pairs.jsonl", pairs[heldout:])
        rows("heldout.jsonl", pairs[:heldout])
        (tmp_path / "shop.yaml").write_text(RECIPE.replace("RATE", str(rate)))
        assert kedge("run", "shop.yaml", "--no-check") == 0
        report = json.loads((tmp_path / "runs/shop/reward/reward-report.json").read_text())
        assert report["pairs"] == heldout
        return report["accuracy"]["value"], sum(map(is_as_the_rule_says, pairs[:heldout])) / heldout

    return run


@pytest.mark.slow
@pytest.mark.parametrize("flip", [0.0, 0.2])
def test_where_the_facts_are_right_it_learns_what_people_like(
    flip: float, train: Callable[..., tuple[float, float]]
) -> None:
    pairs = [row for row in toy.pairs(14_000, 2, flip=flip) if says_the_fact(row)]
    accuracy, best = train(pairs, heldout=2000, layers=2, rate=2e-3)
    assert best == pytest.approx(1 - flip, abs=0.03)
    assert accuracy > best - 0.02


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_look_facts_up_in_the_prompt(train: Callable[..., tuple[float, float]]) -> None:
    """The whole rule. A judge that does not look up facts is right in 80.5 %; this one reached 98.5 %."""
    accuracy, best = train(toy.pairs(44_000, 2), heldout=2000, layers=3, rate=1e-3)
    assert best == 1.0
    assert accuracy > 0.95
