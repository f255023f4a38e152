"""Reward sources of a PPO run: models and functions mixed, a gold source that is never learnt from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
Weights = Callable[[Path], dict[str, torch.Tensor]]

RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8

def size(answers):
    return [len(one.text) + (10 if one.is_finished else 0) for one in answers]
"""
PLAIN = {"kind": "function", "path": "rules.py:plain"}
SIZE = {"kind": "function", "path": "rules.py:size"}


def scores(stage: Path, records: Records) -> list[float]:
    return [one["reward"] for one in records(stage / "samples.jsonl") if one["step"] == 1]


@pytest.mark.parametrize("roles", ["separate", "trunk"])
def test_a_mix_is_the_weighted_sum_of_a_model_and_a_function(
    roles: str, run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    """The first answers do not depend on the reward, so that three runs score the same ones."""
    model = {"kind": "model", "from": str(ppo_home / "judge")}
    settings = {"rules": RULES, "roles": roles, "iterations": 1, "logging": {"samples": 4}}
    by_model = scores(run_ppo(tmp_path / "model", **settings, reward=model), records)
    by_rule = scores(run_ppo(tmp_path / "rule", **settings, reward=PLAIN), records)
    mix = {"kind": "mix", "parts": {"judge": model, "rule": PLAIN}, "weights": {"judge": 0.25, "rule": -3.0}}
    found = scores(run_ppo(tmp_path / "mix", **settings, reward=mix), records)
    assert len(found) == 4
    assert found == pytest.approx([0.25 * a - 3.0 * b for a, b in zip(by_model, by_rule, strict=True)], rel=1e-5)
    assert len({*by_model}) == 4


def test_the_judge_says_the_same_whether_or_not_it_shares_weights(
    run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    settings = {"iterations": 1, "logging": {"samples": 4}, "reward": str(ppo_home / "judge-lora")}
    shared = run_ppo(tmp_path / "lora", **settings, roles="lora")
    alone = run_ppo(tmp_path / "separate", **settings, roles="separate")
    assert scores(shared, records) == pytest.approx(scores(alone, records), rel=1e-4, abs=2e-6)


def test_gold_is_logged_and_never_learnt_from(
    run_ppo: RunPPO, records: Records, weights: Weights, tmp_path: Path
) -> None:
    settings = {"rules": RULES, "iterations": 4, "logging": {"samples": 4, "gold_every": 2}}
    without = run_ppo(tmp_path / "without", **settings)
    stage = run_ppo(tmp_path / "with", **settings, gold=SIZE)
    found = records(stage / "metrics.jsonl")
    assert [one["step"] for one in found if "gold/mean" in one] == [1, 3, 4]  # every second, and the last
    own = ("gold/mean", "reward/gold_correlation")
    assert [{k: v for k, v in one.items() if k not in own} for one in found] == records(without / "metrics.jsonl")
    mine, theirs = weights(stage), weights(without)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    first = [one for one in records(stage / "samples.jsonl") if one["step"] == 1]
    for one in first:
        ended = one["answer"].removesuffix("<|im_end|>")
        assert one["gold"] == len(ended) + (10 if one["finished"] else 0)
    assert found[0]["gold/mean"] == sum(one["gold"] for one in first) / 4
    assert [one["gold"] for one in records(stage / "samples.jsonl") if one["step"] == 2] == [None] * 4


def test_gold_without_a_score_is_counted_by_none_and_changes_nothing(
    run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    rules = RULES + "\ndef patchy(answers):\n    return [None, 2.0, 4.0, 9.0][: len(answers)]\n"
    gold = {"kind": "function", "path": "rules.py:patchy"}
    stage = run_ppo(tmp_path, rules=rules, gold=gold, failures={"max_share": 1.0}, iterations=1)
    (found,) = records(stage / "metrics.jsonl")
    assert found["gold/mean"] == 5.0
    assert found["reward/unscored"] == 0.0
