"""The texts of the demo for numbers that were made up by hand."""

from __future__ import annotations

from typing import Any

from kedge.commands.narrator import typical
from kedge.demo import story
from kedge.demo.recipe import STAGES


def summary(truth: float, proxy: float, kl: float | None, length: float) -> dict[str, Any]:
    return {
        "scores": {"gold": {"mean": {"mean": truth}}, "reward": {"mean": {"mean": proxy}}},
        "kl": None if kl is None else {"mean": kl},
        "length": {"mean": length},
    }


def test_the_table_has_a_row_a_model_and_its_columns_stand_under_each_other() -> None:
    won = {"gold": {"win_rate": {"rate": 0.812, "low": 0.76, "high": 0.8549}}}
    evaluation = {
        "baseline": "sft",
        "models": {"sft": summary(1.734, -0.53, None, 26.94), "best8": summary(-3.2, 11.1, 12.345, 30.0)},
        "comparisons": {"best8": won},
    }
    assert story.table(evaluation, "gold") == [
        "           true reward  proxy reward    KL  tokens  win rate over SFT by the truth",
        "SFT               1.73         -0.53   0.0    26.9  –",
        "best of 8        -3.20         11.10  12.3    30.0  81.2 % [76.0 %, 85.5 %]",
    ]


def test_without_a_truth_the_reward_says_who_wins() -> None:
    won = {"reward": {"win_rate": {"rate": 0.5, "low": 0.25, "high": 0.75}}}
    models = {"base": summary(0.0, 0.25, None, 60.0), "ppo": summary(0.0, 2.5, 3.0, 9.0)}
    for model in models.values():
        del model["scores"]["gold"]
    assert story.table({"baseline": "base", "models": models, "comparisons": {"ppo": won}}, "reward") == [
        "      reward   KL  tokens  win rate over base",
        "base    0.25  0.0    60.0  –",
        "PPO     2.50  3.0     9.0  50.0 % [25.0 %, 75.0 %]",
    ]


def test_every_stage_of_every_version_is_introduced() -> None:
    named = {line.split(":")[0].strip() for stages in STAGES.values() for text in stages for line in text.splitlines()}
    assert set(story.STEPS) <= named
    opened = {
        next(line.strip(" :") for line in text.splitlines() if line.startswith("  ") and line.endswith(":"))
        for stages in STAGES.values()
        for text in stages
    }
    assert opened == set(story.STEPS)


def test_the_typical_case_is_the_one_with_the_median_gain() -> None:
    gains = {"a": 3.0, "b": -1.0, "c": 0.5}
    answers = [
        {
            "model": model,
            "origin": name,
            "prompt": [{"role": "user", "content": f"message {name}"}],
            "answer": f"{model} to {name}",
            "scores": {"gold": 1.0 + (gain if model == "ppo" else 0.0)},
        }
        for model in ("sft", "ppo")
        for name, gain in gains.items()
    ]
    prompt, replies = typical(answers, "sft", "ppo", "gold")
    assert prompt == "message c"
    assert {name: reply["answer"] for name, reply in replies.items()} == {"sft": "sft to c", "ppo": "ppo to c"}
