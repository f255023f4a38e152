"""What each setting of a PPO run does, by numbers that can be worked out from the answers it writes down.

The critic of a run without a reward model says 0 of everything at first, so the first value loss is half the mean
square of the returns, and the first policy loss (every ratio is 1) is minus the mean advantage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kedge.models.loading.tiny import tiny_tokenizer
from kedge.runs.state import load_state

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
Weights = Callable[[Path], dict[str, torch.Tensor]]

LETTERS = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklm"]
ONE: dict[str, Any] = {
    "iterations": 1,
    "batch": 16,
    "minibatches": 1,
    "micro_batch": 5,
    "sampling": {"max_new_tokens": 8, "stop": LETTERS},
    "logging": {"samples": 16},
}
"""One step on answers of 1 to 8 tokens, half of which end by themselves."""
DECAY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    score: float
    length: int
    finished: bool
    kl: float
    prompt: str


def rows_of(stage: Path, records: Records, *, step: int = 1) -> list[Row]:
    found = [one for one in records(stage / "samples.jsonl") if one["step"] == step]
    rows = [
        Row(score=one["reward"], length=one["length"], finished=one["finished"], kl=one["kl"], prompt=one["prompt"])
        for one in found
    ]
    assert len(rows) == 16
    return rows


def on_last(rows: Sequence[Row], scores: Sequence[float]) -> list[list[float]]:
    """A reward for every token: the score on the last one."""
    return [[0.0] * (row.length - 1) + [score] for row, score in zip(rows, scores, strict=True)]


def returns(rewards: Sequence[Sequence[float]], decay: float = DECAY) -> list[list[float]]:
    """Of a critic that says 0: each token's own reward and the discounted sum of what comes after."""
    found: list[list[float]] = []
    for row in rewards:
        total, back = 0.0, list[float]()
        for reward in reversed(row):
            total = reward + decay * total
            back.append(total)
        found.append(back[::-1])
    return found


def mean_per(per: str, table: Sequence[Sequence[float]], width: int) -> float:
    match per:
        case "token":
            return sum(map(sum, table)) / sum(map(len, table))
        case "sequence":
            return statistics.fmean(statistics.fmean(row) for row in table)
        case "sequence_sum":
            return statistics.fmean(sum(row) for row in table)
        case _:
            return sum(map(sum, table)) / (len(table) * width)


def half_squares(table: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[one * one / 2 for one in row] for row in table]


def width_of(rows: Sequence[Row]) -> int:
    """Of the batch: prompt and answer of the longest row, a byte a token and a token for each marker."""
    encode = tiny_tokenizer()
    return max(len(encode(row.prompt)["input_ids"]) + row.length for row in rows)


def normalised(rows: Sequence[Row], *, centre: bool) -> list[float]:
    scores = [row.score for row in rows]
    return [(score - statistics.fmean(scores) * centre) / statistics.pstdev(scores) for score in scores]


SCORES: dict[str, tuple[dict[str, Any], Callable[[Sequence[Row]], list[float]]]] = {
    "as-they-are": ({}, lambda rows: [row.score for row in rows]),
    "standard": ({"normalise": "standard"}, lambda rows: normalised(rows, centre=True)),
    "scale": ({"normalise": "scale"}, lambda rows: normalised(rows, centre=False)),
    "clip": ({"clip": 0.3}, lambda rows: [min(row.score, 0.3) for row in rows]),
    "penalty": ({"missing_eos_penalty": 0.7}, lambda rows: [row.score - 0.7 * (not row.finished) for row in rows]),
    "eos-trick": ({"missing_eos_score": -1.0}, lambda rows: [row.score if row.finished else -1.0 for row in rows]),
    "overlong": (
        {"overlong_buffer": 4, "overlong_penalty": 2.0},
        lambda rows: [row.score - 2.0 * max(0, row.length - 4) / 4 for row in rows],
    ),
    "length": (
        {"length": {"price": 0.5, "least": 3, "most": 5}},
        lambda rows: [row.score - 0.5 * (max(0, 3 - row.length) + max(0, row.length - 5)) for row in rows],
    ),
    "in-order": (
        {"normalise": "standard", "clip": 1.0, "missing_eos_penalty": 0.5},
        lambda rows: [
            max(-1.0, min(1.0, score)) - 0.5 * (not row.finished)
            for row, score in zip(rows, normalised(rows, centre=True), strict=True)
        ],
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_become_rewards(name: str, run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    settings, expected = SCORES[name]
    stage = run_ppo(tmp_path, **ONE, scores=settings)
    rows = rows_of(stage, records)
    (found,) = records(stage / "metrics.jsonl")
    squares = half_squares(returns(on_last(rows, expected(rows))))
    assert found["value/loss"] == pytest.approx(mean_per("token", squares, 0), rel=1e-5)
    assert found["reward/mean"] == pytest.approx(statistics.fmean(row.score for row in rows), rel=1e-6)  # raw
    assert found["length/truncated"] == sum(not row.finished for row in rows) / 16
    assert 0 < found["length/truncated"] < 1


def test_credit_discounts(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    stage = run_ppo(tmp_path, **ONE, loss={"credit": {"gamma": 0.9, "lam": 0.5, "whiten_advantages": False}})
    rows = rows_of(stage, records)
    (found,) = records(stage / "metrics.jsonl")
    table = returns(on_last(rows, [row.score for row in rows]), 0.9 * 0.5)
    assert found["value/loss"] == pytest.approx(mean_per("token", half_squares(table), 0), rel=1e-5)
    assert found["policy/loss"] == pytest.approx(-mean_per("token", table, 0), rel=1e-5)


def test_rewards_are_scaled_to_unit_variance(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    stage = run_ppo(tmp_path, **ONE, loss={"credit": {"scale_rewards": True}})
    rows = rows_of(stage, records)
    (found,) = records(stage / "metrics.jsonl")
    rewards = on_last(rows, [row.score for row in rows])
    flat = [reward for row in rewards for reward in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    table = returns([[(reward - mean) / std + mean for reward in row] for row in rewards])
    assert found["value/loss"] == pytest.approx(mean_per("token", half_squares(table), 0), rel=1e-5)
    assert found["policy/loss"] == pytest.approx(0.0, abs=1e-6)  # whitened advantages have no mean


@pytest.mark.parametrize("per", ["token", "sequence", "sequence_sum", "constant"])
def test_losses_are_means_over_what_they_say(per: str, run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    other = {"token": "constant", "sequence": "token", "sequence_sum": "sequence", "constant": "sequence_sum"}[per]
    losses = {"policy": {"per": per}, "value": {"per": other}, "credit": {"whiten_advantages": False}}
    stage = run_ppo(tmp_path, **ONE, loss=losses)
    rows = rows_of(stage, records)
    (found,) = records(stage / "metrics.jsonl")
    table, width = returns(on_last(rows, [row.score for row in rows])), width_of(rows)
    assert found["policy/loss"] == pytest.approx(-mean_per(per, table, width), rel=1e-5)
    assert found["value/loss"] == pytest.approx(mean_per(other, half_squares(table), width), rel=1e-5)


def test_an_entropy_bonus_lowers_the_loss_by_the_entropy(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    (found,) = records(run_ppo(tmp_path, **ONE, loss={"policy": {"entropy": 0.01}}) / "metrics.jsonl")
    assert found["entropy/mean"] == pytest.approx(math.log(259), rel=1e-2)  # an untrained model hardly prefers a token
    assert found["policy/loss"] == pytest.approx(-0.01 * found["entropy/mean"], rel=1e-4)


KINDS: dict[str, Callable[[float], float]] = {
    "k1": lambda gap: gap,
    "k2": lambda gap: gap * gap / 2,
    "k3": lambda gap: math.exp(-gap) + gap - 1,
    "abs": abs,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_anchor_is_paid_for_by_kind_and_place(
    kind: str, where: str, run_ppo: RunPPO, records: Records, tmp_path: Path
) -> None:
    """Answers of one token, whose KL is written down, in the second step; the critic does not move."""
    stage = run_ppo(
        tmp_path,
        **ONE | {"iterations": 2, "sampling": {"max_new_tokens": 1}},
        kl={"start": 0.3, "kind": kind, "where": where},
        actor={"lr": 0.1},
        critic={"lr": 1e-12},
    )
    rows = rows_of(stage, records, step=2)
    assert max(abs(row.kl) for row in rows) > 0.1
    paid = [0.3 * KINDS[kind](row.kl) for row in rows]
    found = records(stage / "metrics.jsonl")[1]
    in_reward = paid if where == "reward" else [0.0] * 16
    squares = [(row.score - cost) ** 2 / 2 for row, cost in zip(rows, in_reward, strict=True)]
    assert found["value/loss"] == pytest.approx(statistics.fmean(squares), rel=1e-4)
    assert found["policy/loss"] == pytest.approx(statistics.fmean(paid) if where == "loss" else 0.0, rel=1e-3, abs=1e-6)
    assert found["kl/mean"] == pytest.approx(statistics.fmean(row.kl for row in rows), rel=1e-5)


def test_the_coefficient_is_steered(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    """A KL of 0 is as far below its target as an error may be: coef (1 - 0.2 * 16 / 40)."""
    budget = {"start": 0.5, "target": 2.0, "horizon": 40}
    found = records(run_ppo(tmp_path, **ONE | {"iterations": 2}, kl=budget) / "metrics.jsonl")
    assert [one["kl/coef"] for one in found] == pytest.approx([0.5, 0.5 * 0.92], rel=1e-9)


TWICE: dict[str, Any] = {**ONE, "epochs": 2, "actor": {"lr": 0.1}, "critic": {"lr": 0.1}}
"""Two steps on the same answers: in the second the ratios are no longer 1."""


def test_ratios_are_clipped_where_the_recipe_says(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    def clipped(name: str, **policy: Any) -> float:
        (found,) = records(run_ppo(tmp_path / name, **TWICE, loss={"policy": policy}) / "metrics.jsonl")
        return found["policy/clip_fraction"]

    never = {"clip": 0.9999, "clip_high": 1e6}
    assert clipped("never", **never) == 0.0
    above, below = clipped("above", clip=0.9999, clip_high=1e-6), clipped("below", clip=1e-6, clip_high=1e6)
    assert min(above, below) > 0
    assert clipped("both", clip=1e-6) == pytest.approx(above + below, rel=1e-6)
    assert clipped("dual", **never, dual_clip=1.0001) > 0


def test_values_are_clipped_where_the_recipe_says(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    def clipped(name: str, clip: float | None) -> float:
        (found,) = records(run_ppo(tmp_path / name, **TWICE, loss={"value": {"clip": clip}}) / "metrics.jsonl")
        return found["value/clip_fraction"]

    assert clipped("off", None) == 0.0
    assert clipped("on", 1e-6) > 0.0


def steps_done(stage: Path, step: int) -> tuple[int, int]:
    """Optimiser steps of policy and critic."""
    held = load_state(stage / f"checkpoints/step-{step:06d}")["roles"]
    return held["policy"]["train_step"]["step"], held["critic"]["step"]


def test_passes_over_a_batch_end_at_a_kl(run_ppo: RunPPO, tmp_path: Path) -> None:
    several = {**TWICE, "epochs": 3, "minibatches": 2}
    assert steps_done(run_ppo(tmp_path / "all", **several), 1) == (6, 6)
    early = run_ppo(tmp_path / "early", **several, loss={"policy": {"stop_at_kl": 1e-3}})
    assert steps_done(early, 1) == (2, 2)  # the first step cannot have moved, the second has


def test_in_the_warm_up_only_the_critic_learns(
    run_ppo: RunPPO, records: Records, weights: Weights, ppo_home: Path, tmp_path: Path
) -> None:
    stage = run_ppo(tmp_path, **ONE | {"iterations": 3}, critic_warmup=2, actor={"schedule": "linear"})
    assert [steps_done(stage, step) for step in (1, 2, 3)] == [(0, 1), (0, 2), (1, 3)]
    start = weights_in(ppo_home / "tiny")
    for step, is_same in ((2, True), (3, False)):
        state = load_state(stage / f"checkpoints/step-{step:06d}")["roles"]["policy"]["train_step"]["weights"]
        assert all(torch.equal(one, start[name]) for name, one in state.items()) is is_same
    found = records(stage / "metrics.jsonl")
    assert [one["kl/mean"] for one in found] == [0.0] * 3
    assert ["policy/loss" in one for one in found] == [False, False, True]
    assert found[2]["policy/lr"] == 1e-2  # its schedule begins where it does
    assert len({one["value/loss"] for one in found}) == 3
    assert any(not torch.equal(one, start[name]) for name, one in weights(stage).items())


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def test_actor_and_critic_have_rates_of_their_own(run_ppo: RunPPO, records: Records, tmp_path: Path) -> None:
    linear = {"schedule": "linear", "warmup": 0.0}
    rates = {"actor": {"lr": 1e-3, **linear}, "critic": {"lr": 5e-3, **linear}}
    found = records(run_ppo(tmp_path, **ONE | {"iterations": 2, **rates}) / "metrics.jsonl")
    assert [one["policy/lr"] for one in found] == pytest.approx([1e-3, 5e-4], rel=1e-9)
    assert [one["value/lr"] for one in found] == pytest.approx([5e-3, 2.5e-3], rel=1e-9)


def test_the_average_of_the_weights_is_what_is_saved(
    run_ppo: RunPPO, weights: Weights, ppo_home: Path, tmp_path: Path
) -> None:
    last, start = weights(run_ppo(tmp_path / "last", **ONE)), weights_in(ppo_home / "tiny")
    averaged = weights(run_ppo(tmp_path / "ema", **ONE, ema=0.75))
    for name, one in averaged.items():
        torch.testing.assert_close(one, 0.75 * start[name] + 0.25 * last[name], rtol=1e-5, atol=1e-7)


def test_text_is_imitated_alongside(
    run_ppo: RunPPO, records: Records, weights: Weights, ppo_home: Path, tmp_path: Path
) -> None:
    """All five conversations beside the step: their loss is what plain transformers says, a mean over answer tokens."""
    imitate = {"data": str(ppo_home / "demonstrations.jsonl"), "batch": 5, "weight": 0.5, "max_length": 64}
    stage = run_ppo(tmp_path / "with", **ONE, loss={"imitate": imitate})
    (found,) = records(stage / "metrics.jsonl")
    model: Any = AutoModelForCausalLM.from_pretrained(ppo_home / "tiny", dtype=torch.float32)
    tokenizer: Any = tiny_tokenizer()
    losses: list[torch.Tensor] = []
    for word in ("yes", "no", "maybe", "never", "often"):
        opening = tokenizer(f"<|im_start|>user\nSay {word}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        answer = tokenizer(f"{word} it is.<|im_end|>")["input_ids"]
        with torch.no_grad():
            logp_TV = model(torch.tensor([opening + answer])).logits[0].log_softmax(-1)
        losses.append(-logp_TV[len(opening) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0])
    assert found["policy/ptx_loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    with_text, without = weights(stage), weights(run_ppo(tmp_path / "without", **ONE))
    assert any(not torch.equal(with_text[name], one) for name, one in without.items())


def test_conversations_that_are_too_long_to_imitate_are_counted(
    run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    imitate = {"data": str(ppo_home / "demonstrations.jsonl"), "max_length": 40}
    stage = run_ppo(tmp_path, **ONE, loss={"imitate": imitate})
    (event,) = [one for one in records(stage / "events.jsonl") if one["code"] == "ppo.too_long"]
    # 1 + 5 + (4 + word) + 1 + 1 + 1 + 10 for the question, word + 7 + 1 for the answer (and a line's end)
    long = [word for word in ("yes", "no", "maybe", "never", "often") if 2 * len(word) + 31 + 1 > 40]
    assert event["message"].startswith(f"{len(long)} conversations to imitate are longer than 40 tokens")


def test_the_critic_starts_from_the_reward_model_if_asked(
    run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    settings = {**ONE, "reward": str(ppo_home / "judge"), "roles": "trunk"}
    stage = run_ppo(tmp_path / "zero", **settings, memory={"critic_from_reward": False, "trunk_layers": 1})
    rows = rows_of(stage, records)
    (found,) = records(stage / "metrics.jsonl")
    squares = half_squares(returns(on_last(rows, [row.score for row in rows])))
    assert found["value/loss"] == pytest.approx(mean_per("token", squares, 0), rel=1e-4)
    (other,) = records(run_ppo(tmp_path / "seer", **settings) / "metrics.jsonl")
    assert other["reward/mean"] == pytest.approx(found["reward/mean"], rel=1e-5)
    assert abs(other["value/loss"] - found["value/loss"]) > 1e-3 * found["value/loss"]
