"""What an RL run writes of its iterations: the detectors and their state."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kedge.core.records import Rollouts
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.runtime.local import Clock
from kedge.stages.rl.journal import IterationJournal, gold_metrics
from kedge.trainers.settings import KLSettings, ScoreSettings


def journal(*, normalise: str = "none", precision: str = "float32") -> IterationJournal:
    scores = ScoreSettings.model_validate({"normalise": normalise})
    settings = SimpleNamespace(
        detectors=DetectorSettings(),
        kl=KLSettings(target=6.0, limit=12.0),
        scores=scores,
        iterations=9,
        max_steps=None,
    )
    reward = SimpleNamespace(failure_counters=())
    nothing = cast(Any, None)
    return IterationJournal(
        context=nothing,
        settings=cast(Any, settings),
        reward=cast(Any, reward),
        gold=None,
        prompts=nothing,
        tokenizer=nothing,
        clock=Clock(),
        precision=precision,
    )


def test_a_resumed_run_raises_the_alarms_of_an_uninterrupted_one() -> None:
    steps = [{"kl/mean": 0.3 * number} for number in range(40)]
    whole = journal().detectors
    expected = [alarm.code for step, row in enumerate(steps, start=1) for alarm in whole.observe(step, row)]
    assert "kl.near_limit" in expected
    first, second = journal(), journal()
    codes = [alarm.code for step, row in enumerate(steps[:25], start=1) for alarm in first.detectors.observe(step, row)]
    second.load(first.state(), step=25)
    resumed = enumerate(steps[25:], start=26)
    codes += [alarm.code for step, row in resumed for alarm in second.detectors.observe(step, row)]
    assert codes == expected


def test_the_scale_of_scores_that_are_normalised_does_not_matter() -> None:
    rows = [{"reward/std": 50.0}] * 12
    for normalise, expected in (("none", ["reward.scale"]), ("standard", [])):
        detectors = journal(normalise=normalise).detectors
        assert [alarm.code for step, row in enumerate(rows) for alarm in detectors.observe(step, row)] == expected


def rollouts_of(prompts: list[list[int]]) -> Rollouts:
    """Two answers of one token to each prompt of two tokens."""
    tokens_BT = torch.tensor([[*prompt, 9 + number] for prompt in prompts for number in range(2)])
    response_BT = torch.tensor([[False, False, True]]).expand(len(tokens_BT), 3)
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=torch.ones_like(tokens_BT).bool(),
        response_mask_BT=response_BT,
        behaviour_logp_BT=torch.zeros(tokens_BT.shape),
        group_B=torch.arange(len(tokens_BT)),
        finished_B=torch.ones(len(tokens_BT)).bool(),
        version=0,
    )


def test_prompts_that_are_asked_again_are_counted_by_their_tokens_also_after_a_resume() -> None:
    many, few = SimpleNamespace(prompts=[None] * 4, batch=2), SimpleNamespace(prompts=[None] * 3, batch=2)
    first, second = journal(), journal()
    first.prompts = second.prompts = cast(Any, many)
    assert first.prompt_metrics(rollouts_of([[1, 2], [3, 4]])) == {"prompts/repeated": 0.0}
    second.load(first.state(), step=25)
    assert second.prompt_metrics(rollouts_of([[1, 2], [5, 6]])) == {"prompts/repeated": 0.5}
    assert second.prompt_metrics(rollouts_of([[1, 2], [5, 6]])) == {"prompts/repeated": 1.0}
    second.prompts = cast(Any, few)
    assert second.prompt_metrics(rollouts_of([[1, 2], [5, 6]])) == {}  # they cannot but come again


def test_gold_is_compared_with_the_reward_on_the_answers_that_have_both() -> None:
    scores_B, gold_B = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([2.0, 4.0, 6.0, math.nan])
    metrics = gold_metrics(scores_B, gold_B)
    assert metrics["gold/mean"] == pytest.approx(4.0)
    assert metrics["reward/gold_correlation"] == pytest.approx(1.0)
    assert "reward/gold_correlation" not in gold_metrics(scores_B[:1], gold_B[:1])


def test_a_mismatch_in_float32_is_seen_where_bfloat16_explains_it() -> None:
    rows = [{"policy/mismatch": 0.02}] * 5
    for precision, expected in (("float32", ["policy.mismatch"]), ("bfloat16", [])):
        detectors = journal(precision=precision).detectors
        assert [alarm.code for step, row in enumerate(rows) for alarm in detectors.observe(step, row)] == expected
