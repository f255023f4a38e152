"""What was run, in words: every kind of stage from its settings as a run writes them."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.core import plugins
from kedge.report.run.methods import what_was_run


def resolved(kind: str, **given: Any) -> dict[str, Any]:
    """The settings with their defaults, as a manifest has them."""
    stage = plugins.find("stages", kind)
    return stage.settings.model_validate({"kind": kind, **given}).model_dump(mode="json", by_alias=True)


ON_PROMPTS = {"from": "sft", "reward": "reward", "prompts": "p.jsonl"}
ONLINE = {"rounds": 2, "prompts": "p.jsonl", "reward": {"kind": "exact"}, "answers": 6}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            resolved("ppo", **ON_PROMPTS, iterations=9, batch=16, answers=1, kl={"target": 6.0, "limit": 12.0}),
            "PPO: the policy `sft` is improved against `reward` on prompts of `p.jsonl`, 9 iterations of 16 prompts × "
            "one answer, while its reference holds it near a KL of 6 nats a sequence (past 12 it stops).",
        ),
        (
            resolved("group", **ON_PROMPTS, method="dr_grpo", iterations=5, batch=8),
            "Dr. GRPO, without a critic: the policy `sft` is improved against `reward` on prompts of `p.jsonl`, 5 "
            "iterations of 8 prompts × 8 answers that are compared with each other, and nothing holds it to its "
            "reference.",
        ),
        (
            resolved("group", **ON_PROMPTS, method="remax", iterations=5, batch=8, kl={"limit": 9.0}),
            "ReMax, without a critic: the policy `sft` is improved against `reward` on prompts of `p.jsonl`, 5 "
            "iterations of 8 prompts × one answer, while its reference holds it (past 9 it stops).",
        ),
        (
            resolved("preference", data="pairs.jsonl", method="simpo", epochs=2),
            "SimPO: the recipe's model learns from the preferences of `pairs.jsonl` directly, 2 passes over them, 64 "
            "pairs a step, with no reference.",
        ),
        (
            resolved("preference", **{"from": "sft"}, data="thumbs.jsonl", method="kto", batch=16),
            "KTO: `sft` learns from the preferences of `thumbs.jsonl` directly, one pass over them, 16 answers a step, "
            "with its start as the reference.",
        ),
        (
            resolved("preference", **{"from": "sft"}, online=ONLINE),
            "DPO, online: in each of 2 rounds `sft` answers prompts of `p.jsonl` 6 times, a reward of kind `exact` "
            "scores the answers, and it learns from pairs of them (the best against the worst).",
        ),
        (
            resolved("preference", **{"from": "sft"}, data="pairs.jsonl", online={**ONLINE, "pairs": "all"}),
            "DPO, online: in each of 2 rounds `sft` answers prompts of `p.jsonl` 6 times, a reward of kind `exact` "
            "scores the answers, and it learns from pairs of them (every two that score apart), beside pairs of "
            "`pairs.jsonl`.",
        ),
        (
            resolved("best_of_n", **ON_PROMPTS, n=4, method={"kind": "rejection", "rounds": 3}),
            "Best of 4, by rejection sampling: `sft` imitates the best of its 4 answers to each prompt of `p.jsonl`, "
            "chosen by `reward`, in 3 rounds.",
        ),
        (
            resolved("best_of_n", **ON_PROMPTS, method={"kind": "bond", "steps": 40}),
            "Best of 8, distilled: `sft` is moved to the distribution of the best of its 8 answers to each prompt of "
            "`p.jsonl`, chosen by `reward`, in 40 steps.",
        ),
    ],
)
def test_a_run_in_one_sentence(settings: dict[str, Any], told: str) -> None:
    assert what_was_run(settings["kind"], settings) == told


def test_every_stage_there_is_has_a_sentence_of_its_own() -> None:
    assert not [kind for kind in plugins.names("stages") if what_was_run(kind, {}).startswith("A stage of kind")]
