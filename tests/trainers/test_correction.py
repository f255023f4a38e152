"""Answers of other weights: what each token counts for, which answers are left out, and what cannot be learnt from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.testing import assert_close

from kedge.core.errors import NumericsError
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience, Rollouts, take
from kedge.trainers.correction import AllDropped, correction_metrics, near_policy, weighted
from kedge.trainers.settings import CorrectionSettings, KLSettings
from kedge.trainers.shared import EvaluatedRollouts, add_kl_and_entropy, check_finite, rollout_metrics

# Ratios of the policy to the sampler: answer 0 has 3 and 1/2 (their mean is sqrt(1.5)), answer 1 has 1 alone.
RATIO_BT = torch.tensor([[9.0, 3.0, 0.5], [9.0, 1.0, 9.0]])
MASK_BT = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
REF_GAP = 0.5
"""Nats a token by which the policy is surer than the reference."""


def evaluated_with(ratio_BT: Tensor = RATIO_BT) -> EvaluatedRollouts:
    old_BT = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, math.nan]])
    rollouts = Rollouts(
        tokens_BT=torch.tensor([[5, 6, 7], [5, 8, 0]]),
        attention_mask_BT=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
        response_mask_BT=MASK_BT,
        behaviour_logp_BT=torch.where(MASK_BT, old_BT - ratio_BT.log(), torch.tensor(math.nan)),
        group_B=torch.tensor([0, 1]),
        finished_B=torch.tensor([True, True]),
        version=3,
    )
    return EvaluatedRollouts(
        rollouts=rollouts,
        scores_B=torch.tensor([1.0, 2.0]),
        old_logp_BT=old_BT,
        ref_logp_BT=old_BT - REF_GAP,
        values_BT=torch.zeros(2, 3),
    )


def experience_of(evaluated: EvaluatedRollouts) -> Experience:
    mask_BT = evaluated.rollouts.response_mask_BT
    zeros_BT = torch.zeros(mask_BT.shape)
    return Experience(
        rollouts=evaluated.rollouts,
        old_logp_BT=zeros_BT,
        ref_logp_BT=zeros_BT,
        advantages_BT=zeros_BT,
        weight_BT=evaluated.weight_BT,
    )


def test_a_weight_a_token_and_the_kl_by_it() -> None:
    evaluated = weighted(evaluated_with(), CorrectionSettings(cap=2.0))
    assert evaluated.weight_BT is not None
    assert_close(evaluated.weight_BT[MASK_BT], torch.tensor([2.0, 0.5, 1.0]))
    assert_close(evaluated.kl_B, torch.tensor([2.0 * REF_GAP + 0.5 * REF_GAP, REF_GAP]))
    assert_close(evaluated_with().kl_B, torch.tensor([2 * REF_GAP, REF_GAP]))
    metrics = correction_metrics(evaluated, None, CorrectionSettings(cap=2.0))
    assert metrics == pytest.approx({"correct/weight": 3.5 / 3, "correct/capped": 1 / 3, "correct/dropped": 0.0})


def test_a_weight_an_answer() -> None:
    settings = CorrectionSettings(cap=1.4, per="sequence")
    evaluated = weighted(evaluated_with(), settings)  # 3 * 1/2 = 1.5, capped
    assert evaluated.weight_BT is not None
    assert_close(evaluated.weight_BT[MASK_BT], torch.tensor([1.4, 1.4, 1.0]))
    assert_close(evaluated.kl_B, torch.tensor([1.4 * 2 * REF_GAP, REF_GAP]))
    metrics = correction_metrics(evaluated, None, settings)  # of answers, not of tokens
    assert metrics == pytest.approx({"correct/weight": 1.2, "correct/capped": 0.5, "correct/dropped": 0.0})


@pytest.mark.parametrize(("drop", "near"), [((0.9, 1.2), [False, True]), ((0.9, 1.3), [True, True])])
def test_answers_far_from_the_policy_are_left_out(drop: tuple[float, float], near: list[bool]) -> None:
    """sqrt(1.5) is 1.2247."""
    settings = CorrectionSettings(drop=drop)
    evaluated = weighted(evaluated_with(), settings)
    is_near_B = near_policy(evaluated, settings)
    assert is_near_B is not None
    assert is_near_B.tolist() == near
    assert correction_metrics(evaluated, is_near_B, settings)["correct/dropped"] == near.count(False) / 2


def test_where_none_is_near_it_is_said_with_the_numbers() -> None:
    far = take(evaluated_with(), torch.tensor([0]))
    with pytest.raises(AllDropped) as error:
        near_policy(far, CorrectionSettings(drop=(0.99, 1.01)))
    assert str(error.value) == (
        "all 1 answers were sampled too far from the policy: their mean ratios of probabilities are 1.225 to 1.225, "
        "outside loss.correct.drop [0.99, 1.01]; nothing was learnt from them"
    )


def test_without_settings_nothing_is_weighed_or_left_out() -> None:
    evaluated = evaluated_with()
    assert weighted(evaluated, None) is evaluated
    assert near_policy(evaluated, None) is None
    assert near_policy(evaluated, CorrectionSettings()) is None
    assert correction_metrics(evaluated, None, None) == {}


def test_the_loss_and_the_kl_in_it_count_by_weight_and_the_entropy_does_not() -> None:
    """Loss 10 a token, KL 3 nats a token at 0.1, entropy 4 at 0.5: w (10 + 0.3) - 2."""
    experience = experience_of(weighted(evaluated_with(), CorrectionSettings(cap=2.0)))
    ones_BT = torch.ones(2, 3)

    def loss(experience: Experience) -> Tensor:
        item = ItemLoss(loss_BT=10 * ones_BT, stats_BT={})
        kl = KLSettings(where="loss", kind="k1")
        item = add_kl_and_entropy(item, 3 * ones_BT, 4 * ones_BT, experience, kl=kl, coef=0.1, entropy=0.5)
        return item.loss_BT[MASK_BT]

    assert_close(loss(experience), torch.tensor([2 * 10.3 - 2, 0.5 * 10.3 - 2, 10.3 - 2]))
    assert_close(loss(replace(experience, weight_BT=None)), torch.full((3,), 10.3 - 2))


def test_weights_are_cut_with_the_rows_they_belong_to() -> None:
    experience = take(experience_of(weighted(evaluated_with(), CorrectionSettings())), torch.tensor([1]))
    assert experience.weight_BT is not None
    assert experience.weight_BT[:, 1].tolist() == [1.0]


def test_a_log_prob_of_the_generator_that_is_not_finite_refuses_the_batch() -> None:
    evaluated = evaluated_with(torch.tensor([[1.0, math.nan, 1.0], [1.0, 1.0, 1.0]]))
    with pytest.raises(NumericsError, match="generator log-prob: 1 of 6 are not finite, first nan at row 0, token 1"):
        check_finite(evaluated)


def test_a_ratio_beyond_every_number_counts_for_the_cap() -> None:
    evaluated = weighted(evaluated_with(torch.tensor([[1.0, 1e38, 1e-38], [1.0, 1.0, 1.0]])), CorrectionSettings())
    assert evaluated.weight_BT is not None
    assert evaluated.weight_BT[MASK_BT].isfinite().all()
    assert evaluated.weight_BT[0, 1] == 2.0


@pytest.mark.parametrize(("age", "name"), [(None, "policy/mismatch"), (0, "policy/mismatch"), (2, "policy/drift")])
def test_the_way_the_policy_has_gone_is_no_mismatch(age: int | None, name: str) -> None:
    metrics = rollout_metrics(evaluated_with(), num_sampled=2, age=age)
    assert metrics[name] == pytest.approx((math.log(3) + math.log(2)) / 3)
    assert ({"policy/mismatch", "policy/drift"} - {name}).isdisjoint(metrics)
    assert metrics.get("age/mean") == age


@pytest.mark.parametrize("drop", [(1.01, 1.02), (0.5, 0.9), (1.2, 0.8), (-0.1, 2.0)])
def test_bounds_that_leave_out_the_policy_itself_are_refused(drop: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="with 1 between them"):
        CorrectionSettings(drop=drop)
