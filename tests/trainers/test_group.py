"""One iteration without a critic, by hand, for every method: what answers are worth, and what is learnt from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kedge.algorithms import RunningMoments
from kedge.core.errors import NumericsError
from kedge.core.loss import ItemLoss
from kedge.core.optimiser import Per
from kedge.core.plugins import names
from kedge.core.protocols import Metrics, PolicyLoss
from kedge.core.records import Experience, Rollouts, take
from kedge.stages.group.settings import find_method
from kedge.trainers.group import GroupConfig, GroupRoles, actor_loss, iteration
from kedge.trainers.settings import CorrectionSettings, KLSettings, ScoreSettings
from kedge.trainers.shared import (
    EvaluatedRollouts,
    GreedyBaseline,
    KLExceeded,
    RewardShaper,
    ScoredRollouts,
    kl_controller,
)

NAN = math.nan
LENGTHS = [2, 1, 3, 1]
SCORES = [3.0, 1.0, 5.0, 6.0]
GREEDY = [2.0, 2.0, 4.0, 4.0]


def scored_of(scores: list[float] = SCORES, greedy: list[float] = GREEDY, **facts: Any) -> ScoredRollouts:
    """Two prompts of two tokens, two answers each."""
    index_T, length_B = torch.arange(5), torch.tensor(LENGTHS)
    attention_BT = index_T < length_B[:, None] + 2
    rollouts = Rollouts(
        tokens_BT=torch.arange(20).reshape(4, 5),
        attention_mask_BT=attention_BT,
        response_mask_BT=attention_BT & (index_T >= 2),
        behaviour_logp_BT=-1.0 * attention_BT,
        group_B=torch.tensor([4, 4, 9, 9]),
        finished_B=torch.tensor([True, True, False, True]),
        version=0,
    )
    baseline = GreedyBaseline(
        scores_B=torch.tensor(greedy),
        finished_B=torch.tensor([True, True, False, False]),
        length_B=torch.tensor([1, 1, 8, 8]),
    )
    known: dict[str, Any] = {"mean_score": 3.75, "zero_variance": 0.25, "rounds": 1} | facts
    return ScoredRollouts(rollouts=rollouts, scores_B=torch.tensor(scores), greedy=baseline, **known)


@dataclass
class FakePolicy:
    logp_BT: Tensor
    approx_kl: float = 0.0
    updates: list[tuple[Experience, Per, ItemLoss]] = field(default_factory=list[tuple[Experience, Per, ItemLoss]])

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.logp_BT

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics:
        experience = take(experience, experience.rollouts.tokens_BT[:, 0].argsort())  # as they were before the shuffle
        item = loss(experience.old_logp_BT, torch.zeros_like(experience.old_logp_BT), experience)
        self.updates.append((experience, per, item))
        return {"loss": 1.0, "approx_kl": self.approx_kl, "entropy": 0.5}


@dataclass
class Still:
    answer_BT: Tensor

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.answer_BT


class Here:
    def gather(self, *calls: Callable[[], Any], phase: str = "judge") -> list[Any]:
        del phase
        return [call() for call in calls]


def config(
    name: str, *, coef: float = 0.2, method_settings: dict[str, Any] | None = None, **settings: Any
) -> GroupConfig:
    method = find_method(name)
    kl = KLSettings.model_validate({**method.traits.kl, "start": coef})
    own = method.settings.model_validate(method_settings or {})
    return GroupConfig(method=method, method_settings=own, kl=kl, **{"max_new_tokens": 8, **settings})


def learn(
    scored: ScoredRollouts, cfg: GroupConfig, *, shaper: RewardShaper | None = None, approx_kl: float = 0.0
) -> tuple[FakePolicy, EvaluatedRollouts, Metrics]:
    """The policy is 0.5 nats a token more sure than the reference, so with 0.2 a token pays 0.1."""
    mask_BT = scored.rollouts.response_mask_BT
    policy = FakePolicy(-1.0 * mask_BT, approx_kl)
    roles = GroupRoles(policy=policy, reference=Still(-1.5 * mask_BT))
    evaluated, metrics = iteration(scored, roles, cfg, kl_controller(cfg.kl), shaper or RewardShaper(), Here(), seed=5)
    return policy, evaluated, metrics


def on_tokens(*rows: list[float]) -> Tensor:
    """Behind two tokens of a prompt, up to five in all."""
    return torch.tensor([[0.0, 0.0, *row, *[0.0] * (3 - len(row))] for row in rows])


def spread(*rows: float) -> Tensor:
    return on_tokens(*([one] * length for one, length in zip(rows, LENGTHS, strict=True)))


HALF = math.sqrt(0.5)
"""Of two scores the sample std is their distance over sqrt(2): the better one is half the distance above the mean."""
# What whole answers earn where the KL is paid in the reward: 3 - 0.2, 1 - 0.1, 5 - 0.3, 6 - 0.1.
TO_GO = [[2.8, 2.9], [0.9], [4.7, 4.8, 4.9], [5.9]]
FLAT = [one for row in TO_GO for one in row]
AVERAGE = fmean(row[0] for row in TO_GO)
GOLDEN: dict[str, tuple[Tensor, Per]] = {
    "grpo": (spread(HALF, -HALF, -HALF, HALF), "sequence"),
    "dr_grpo": (spread(1.0, -1.0, -0.5, 0.5), "sequence_sum"),
    "rloo": (spread(1.9, -1.9, -1.2, 1.2), "sequence_sum"),
    "reinforce": (on_tokens(*([one - AVERAGE for one in row] for row in TO_GO)), "sequence_sum"),
    "reinforce++": (on_tokens(*([(one - fmean(FLAT)) / pstdev(FLAT) for one in row] for row in TO_GO)), "token"),
    # 3 - 2, 1 - 2, 5 - 4, 6 - 4; less what the token and those after it pay
    "remax": (on_tokens([0.8, 0.9], [-1.1], [0.7, 0.8, 0.9], [1.9]), "sequence_sum"),
    "gspo": (spread(HALF, -HALF, -HALF, HALF), "sequence"),
    "cispo": (spread(HALF, -HALF, -HALF, HALF), "token"),
    "dapo": (spread(HALF, -HALF, -HALF, HALF), "token"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_advantages_by_hand(name: str) -> None:
    policy, _, metrics = learn(scored_of(), config(name))
    ((experience, per, _),) = policy.updates
    expected_BT, expected_per = GOLDEN[name]
    assert_close(experience.advantages_BT, expected_BT, rtol=1e-4, atol=1e-5)
    assert per == expected_per
    assert metrics["kl/mean"] == pytest.approx((1.0 + 0.5 + 1.5 + 0.5) / 4)
    assert metrics["kl/coef"] == 0.2
    assert metrics["entropy/mean"] == 0.5


def test_every_method_has_golden_values_and_is_named_as_its_entry_point() -> None:
    assert set(GOLDEN) == set(names("algorithms"))
    assert {name: find_method(name).settings.model_fields["kind"].default for name in GOLDEN} == {
        name: name for name in GOLDEN
    }


MOVED = [[0.6, 0.0], [0.3], [-0.9, 0.0, 2.0], [0.0]]
"""Log-ratios of a policy that has moved."""


def moved(name: str, *, coef: float) -> Tensor:
    """The loss on the response tokens of each row in turn, after the policy has moved by `MOVED`."""
    mask_BT = scored_of().rollouts.response_mask_BT
    old_BT, advantages_BT = -1.0 * mask_BT, spread(1.0, -1.0, -0.5, 0.5)
    experience = Experience(
        rollouts=scored_of().rollouts, old_logp_BT=old_BT, ref_logp_BT=old_BT - 0.5, advantages_BT=advantages_BT
    )
    logp_BT = old_BT + on_tokens(*MOVED)
    cfg = config(name, entropy=0.1)
    return actor_loss(logp_BT, torch.full(mask_BT.shape, 2.0), experience, cfg=cfg, coef=coef).loss_BT[mask_BT]


E = math.exp
ONE_RATIO = E(1.1 / 3)
"""Of the third answer as a whole, by the mean of its tokens."""
LOSSES = {
    # -min(ratio A, clamped A): 1.82 -> 1.2; 1.35 with A < 0 stays; 0.41 with A < 0 -> 0.8; 7.39 with A < 0 stays
    "grpo": [-1.2, -1.0, E(0.3), 0.4, 0.5, 0.5 * E(2), -0.5],
    "reinforce++": [-1.2, -1.0, E(0.3), 0.4, 0.5, 0.5 * E(2), -0.5],
    "dapo": [-1.28, -1.0, E(0.3), 0.4, 0.5, 0.5 * E(2), -0.5],
    # -A log p, where log p is -0.4, -1; -0.7; -1.9, -1, 1; -1
    "rloo": [0.4, 1.0, -0.7, -0.95, -0.5, 0.5, 0.5],
    # the same times the ratio, which is 6 at most
    "cispo": [0.4 * E(0.6), 1.0, -0.7 * E(0.3), -0.95 * E(-0.9), -0.5, 0.5 * 6, 0.5],
    # one ratio an answer: 1.35 -> 1.0004 where A > 0
    "gspo": [-1.0004, -1.0004, E(0.3), 0.5 * ONE_RATIO, 0.5 * ONE_RATIO, 0.5 * ONE_RATIO, -0.5],
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_after_the_policy_has_moved_by_hand(name: str) -> None:
    expected = torch.tensor(LOSSES[name]) - 0.1 * 2.0  # the entropy bonus
    assert_close(moved(name, coef=0.0), expected, rtol=1e-4, atol=1e-5)


def test_the_kl_is_paid_where_the_method_says() -> None:
    """k3 of the gaps to the reference, which are 0.5 more than what the policy has moved by."""
    gaps = torch.tensor([0.5 + one for row in MOVED for one in row])
    paid = 0.3 * ((-gaps).exp() + gaps - 1)
    assert_close(moved("grpo", coef=0.3) - moved("grpo", coef=0.0), paid, rtol=1e-4, atol=1e-5)
    assert_close(moved("rloo", coef=0.3), moved("rloo", coef=0.0))


def test_dr_grpo_divides_by_the_longest_answer_allowed_whatever_the_lengths_are() -> None:
    assert_close(moved("dr_grpo", coef=0.3), moved("grpo", coef=0.3) / 8)


def test_methods_without_a_ratio_still_say_how_far_the_policy_moved() -> None:
    policy, _, _ = learn(scored_of(), config("remax"))
    (_, _, item) = policy.updates[0]
    assert set(item.stats_BT) == {"ratio", "approx_kl"}
    assert item.stats_BT["ratio"].unique().tolist() == [1.0]


def test_the_baseline_of_reinforce_is_what_came_before() -> None:
    cfg = config("reinforce")
    shaper = RewardShaper(returns=RunningMoments(count=4, mean=2.0, squares=0.0))
    policy, _, _ = learn(scored_of(), cfg, shaper=shaper)
    expected_BT = on_tokens(*([one - 2.0 for one in row] for row in TO_GO))
    assert_close(policy.updates[0][0].advantages_BT, expected_BT)
    assert (shaper.returns.count, shaper.returns.mean) == (8, pytest.approx((2.0 + AVERAGE) / 2))
    again = RewardShaper()
    again.load(shaper.state())
    assert again == shaper


def test_returns_are_discounted() -> None:
    """With 0.5, the first of two tokens has -0.1 + 2.9 / 2; of three: -0.1 + (-0.1 + 4.9 / 2) / 2."""
    cfg = config("reinforce", method_settings={"gamma": 0.5})
    shaper = RewardShaper(returns=RunningMoments(count=1, mean=0.0, squares=0.0))
    policy, _, _ = learn(scored_of(), cfg, shaper=shaper)
    expected_BT = on_tokens([1.35, 2.9], [0.9], [1.075, 2.35, 4.9], [5.9])
    assert_close(policy.updates[0][0].advantages_BT, expected_BT)


def test_the_greedy_answer_is_shaped_as_the_others_are() -> None:
    """One that was cut off loses 2; the likeliest answers to the second prompt were, and so was its first answer."""
    cfg = config("remax", coef=0.0, scores=ScoreSettings(missing_eos_penalty=2.0))
    policy, _, _ = learn(scored_of(), cfg)
    assert_close(policy.updates[0][0].advantages_BT, spread(1.0, -1.0, (5 - 2) - (4 - 2), 6 - (4 - 2)))


def test_a_row_without_a_score_or_without_a_baseline_is_left_out() -> None:
    """What is left of the first group has nobody to be compared with."""
    policy, evaluated, metrics = learn(scored_of([3.0, NAN, 5.0, 6.0]), config("grpo"))
    assert evaluated.rollouts.group_B.tolist() == [4, 9, 9]
    assert_close(policy.updates[0][0].advantages_BT[:, 2], torch.tensor([0.0, -HALF, HALF]), rtol=1e-4, atol=1e-5)
    assert metrics["reward/unscored"] == 0.25
    policy, evaluated, _ = learn(scored_of(greedy=[2.0, 2.0, NAN, 4.0]), config("remax", coef=0.0))
    assert evaluated.scores_B.tolist() == [3.0, 1.0, 6.0]
    assert policy.updates[0][0].advantages_BT[:, 2].tolist() == [1.0, -1.0, 2.0]


def test_the_reward_that_is_written_down_is_of_all_answers_drawn() -> None:
    _, _, metrics = learn(scored_of(mean_score=0.9, zero_variance=0.75, rounds=4), config("dapo"))
    assert (metrics["reward/mean"], metrics["group/zero_variance"], metrics["group/rounds"]) == (0.9, 0.75, 4.0)
    _, _, metrics = learn(scored_of(), config("reinforce"))
    assert "group/zero_variance" not in metrics  # nobody compares groups there


def test_steps_are_cut_and_stopped_as_in_ppo() -> None:
    policy, _, _ = learn(scored_of(), config("grpo", epochs=2, minibatches=3))
    sizes = [len(experience.advantages_BT) for experience, _, _ in policy.updates]
    assert sizes == [2, 1, 1, 2, 1, 1]
    policy, _, _ = learn(scored_of(), config("grpo", epochs=2, minibatches=3, stop_at_kl=0.01), approx_kl=0.02)
    assert len(policy.updates) == 1


def test_a_broken_budget_stops_before_anything_is_learnt() -> None:
    cfg = config("grpo")
    tight = replace(cfg, kl=cfg.kl.model_copy(update={"limit": 0.8}))
    shaper = RewardShaper()
    with pytest.raises(KLExceeded, match=r"0\.875 nats a sequence, over the limit of 0\.8"):
        learn(scored_of(), tight, shaper=shaper)
    assert shaper == RewardShaper()


def test_a_batch_that_is_not_finite_is_refused_before_anything_is_learnt() -> None:
    bad, shaper = replace(scored_of(), scores_B=torch.tensor([1.0, math.inf, 2.0, 3.0])), RewardShaper()
    with pytest.raises(NumericsError, match="reward: 1 of 4 are not finite, first inf at row 1"):
        learn(bad, config("grpo"), shaper=shaper)
    assert shaper == RewardShaper()


def test_answers_of_other_weights_count_by_their_ratio_and_those_far_from_the_policy_leave() -> None:
    """Whoever sampled said ln 1.5 less of the tokens of answer 1, ln 9 less of those of answer 3."""
    scored = scored_of()
    gap_B1 = torch.tensor([1.0, 1.5, 1.0, 9.0]).log()[:, None]
    rollouts = replace(scored.rollouts, behaviour_logp_BT=scored.rollouts.behaviour_logp_BT - gap_B1)
    plain, _, _ = learn(scored, config("rloo"))
    correct = CorrectionSettings(cap=1.4, drop=(0.5, 2.0))
    policy, _, metrics = learn(replace(scored, rollouts=rollouts), config("rloo", correct=correct))
    ((whole, _, own),), ((experience, _, item),) = plain.updates, policy.updates
    assert (len(whole.advantages_BT), len(experience.advantages_BT)) == (4, 3)
    assert_close(experience.advantages_BT, whole.advantages_BT[:3])  # compared with all answers to the prompt
    mask_BT = experience.rollouts.response_mask_BT
    weight_B1 = torch.tensor([[1.0], [1.4], [1.0]])
    assert_close((item.loss_BT * mask_BT), weight_B1 * own.loss_BT[:3] * mask_BT)
    assert metrics["correct/dropped"] == 0.25
