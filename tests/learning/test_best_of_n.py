"""Best-of-N where the answer is known: one token over 259, whose best-of-N has a closed form; and the toy shop."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.data.examples import Message
from kedge.data.template import encode_prompt
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import tiny_model, tiny_tokenizer
from kedge.testing import toy

RULES = """
def score(answer):
    return sum(map(ord, answer.text)) * 37 % 7
"""
RECIPE = """
kedge: 1
name: arms
seed: 3
model: ./model
device: cpu
stages:
  best:
    kind: best_of_n
    reward: {kind: function, path: "rules.py:score"}
    prompts: prompts.jsonl
    n: 4
    sampling: {max_new_tokens: 1}
    rows: 512
    batch: 64
    micro_batch: 512
    checkpoints: {every: 1000}
"""


def opinionated(folder: Path) -> None:
    """A tiny model whose answers are far from uniform."""
    model = tiny_model(seed=1, hidden=32, layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8.0)  # and so the head, which is tied to it
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@torch.no_grad()
def distribution(folder: Path) -> list[float]:
    prompt = encode_prompt(tiny_tokenizer(), (Message("user", "Hi"),))
    return load_causal(folder, dtype="float32")(torch.tensor([prompt])).logits[0, -1].softmax(-1).tolist()


def scores_of_tokens(count: int) -> list[int]:
    """What the rule says of each answer of one token; the one that ends it says nothing."""
    tokenizer = tiny_tokenizer()
    texts = ["" if token == tokenizer.eos_token_id else str(tokenizer.decode([token])) for token in range(count)]
    return [sum(map(ord, text)) * 37 % 7 for text in texts]


def best_of(probs: list[float], scores: list[int], n: int) -> list[float]:
    """P(score <= s)^n − P(score < s)^n, spread within a score as the answers are."""
    level = {s: sum(p for p, other in zip(probs, scores, strict=True) if other == s) for s in set(scores)}
    below = {s: sum(p for other, p in level.items() if other < s) for s in level}
    return [p / level[s] * ((below[s] + level[s]) ** n - below[s] ** n) for p, s in zip(probs, scores, strict=True)]


def distance(one: list[float], other: list[float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(p - q) for p, q in zip(one, other, strict=True))


@pytest.fixture
def run(kedge: Callable[..., int], rows: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """The recipe with a method, on so many copies of one prompt; gives the folder of the stage."""
    opinionated(tmp_path / "model")
    (tmp_path / "rules.py").write_text(RULES)

    def go(method: str, *, copies: int) -> Path:
        rows("prompts.jsonl", [{"prompt": "Hi"}] * copies)
        (tmp_path / "arms.yaml").write_text(RECIPE + f"    method: {method}\n")
        assert kedge("run", "arms.yaml", "--no-check") == 0
        return tmp_path / "runs/arms/best"

    return go


def test_the_chosen_answers_have_the_known_distribution(run: Callable[..., Path], tmp_path: Path) -> None:
    stage = run("{kind: rejection, epochs: 0.001, finished: false}", copies=4000)
    probs = distribution(tmp_path / "model")
    scores = scores_of_tokens(len(probs))
    exact = best_of(probs, scores, 4)
    assert distance(probs, exact) > 0.4  # there is something to see
    best: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, (stage / "answers-1.jsonl").read_text().splitlines()):
        assert row["score"] == scores[row["tokens"][0]]
        if row["prompt"] not in best or row["score"] > best[row["prompt"]]["score"]:
            best[row["prompt"]] = row
    drawn = Counter(row["tokens"][0] for row in best.values())
    counts = [drawn[token] for token in range(len(probs))]
    # χ² over the tokens that are expected five times or more, the others together; its mean is its degrees of freedom,
    # its variance twice that: four standard deviations are one false alarm in thousands of seeds, and this is one seed.
    expected = [4000 * p for p in exact]
    common = [token for token, e in enumerate(expected) if e >= 5]
    rest = 4000 - sum(expected[token] for token in common), 4000 - sum(counts[token] for token in common)
    chi = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
    chi += (rest[1] - rest[0]) ** 2 / rest[0]
    assert chi < len(common) + 4 * (2 * len(common)) ** 0.5
    taught = [row["extra"]["score"] for row in map(json.loads, (stage / "chosen.jsonl").read_text().splitlines())]
    assert sorted(taught) == sorted(row["score"] for row in best.values())


@pytest.mark.slow
def test_distilling_reaches_the_distribution_of_the_best_of_n(run: Callable[..., Path], tmp_path: Path) -> None:
    """Anchors of one prompt are few; over sixteen copies of it their luck evens out."""
    stage = run(
        "{kind: bond, steps: 200, anchors: 128, answers: 4}\n    optimiser: {lr: 1e-2, schedule: linear}", copies=16
    )
    probs = distribution(tmp_path / "model")
    exact = best_of(probs, scores_of_tokens(len(probs)), 4)
    assert distance(probs, exact) > 0.4
    assert distance(distribution(stage / "model"), exact) < 0.1


# The toy shop

METHODS = {"rejection": ("{kind: rejection, rounds: 2}", "2e-3"), "bond": ("{kind: bond, steps: 60}", "1e-3")}
STAGE = """
  NAME:
    kind: best_of_n
    from: sft
    method: METHOD
    reward: {kind: function, path: "rules.py:true"}
    prompts: prompts.jsonl
    n: 4
    sampling: {max_new_tokens: 24}
    rows: 128
    batch: 32
    micro_batch: 96
    checkpoints: {every: 1000}
    optimiser: {lr: RATE, beta2: 0.98}
"""
EVALUATE = """
  eval:
    kind: evaluate
    models: [sft, rejection, bond]
    prompts: heldout.jsonl
    reward: {kind: function, path: "rules.py:true"}
    max_new_tokens: 24
    dtype: float32
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_methods_raise_the_true_score_over_sft(
    seed: int,
    kedge: Callable[..., int],
    rows: Callable[..., Path],
    shop: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows("prompts.jsonl", toy.prompts(300, seed + 20))
    rows("heldout.jsonl", toy.prompts(400, seed + 40))
    stages = "".join(
        STAGE.replace("NAME", name).replace("METHOD", method).replace("RATE", rate)
        for name, (method, rate) in METHODS.items()
    )
    shop(seed, stages + EVALUATE)
    assert kedge("run", "shop.yaml", "--no-check") == 0
    found = json.loads((tmp_path / "runs/shop/eval/evaluation.json").read_text())["comparisons"]
    gains = {name: one["reward"]["gain"] for name, one in found.items()}
    assert {name: gain for name, gain in gains.items() if gain["low"] < 0.1} == {}
    first = (tmp_path / "runs/shop/rejection/metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["kl/best"] == pytest.approx(math.log(4) - 3 / 4)
