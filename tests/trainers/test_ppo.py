"""One PPO iteration, by hand: who is asked, what is learnt from, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kedge.core.errors import NumericsError
from kedge.core.loss import ItemLoss
from kedge.core.optimiser import Per
from kedge.core.protocols import Metrics, PolicyLoss, ValueLoss
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.trainers.ppo import PPORoles, actor_loss, iteration
from kedge.trainers.settings import (
    CorrectionSettings,
    CreditSettings,
    KLSettings,
    LengthPrice,
    PolicyLossSettings,
    PPOConfig,
    ScoreSettings,
)
from kedge.trainers.shared import (
    EvaluatedRollouts,
    KLController,
    KLExceeded,
    RewardShaper,
    check_finite,
    correlation,
    drop_unscored,
    explained_variance,
    kl_controller,
    mean_over_steps,
    minibatches,
    text_metrics,
)

NAN = math.nan


def rollouts_of(lengths: list[int], *, finished: list[bool] | None = None) -> Rollouts:
    """Prompts of two tokens, then so many of a response."""
    width = max(lengths) + 2
    index_T, length_B = torch.arange(width), torch.tensor(lengths) + 2
    attention_BT = index_T < length_B[:, None]
    return Rollouts(
        tokens_BT=torch.arange(len(lengths) * width).reshape(len(lengths), width) % 50,
        attention_mask_BT=attention_BT,
        response_mask_BT=attention_BT & (index_T >= 2),
        behaviour_logp_BT=torch.full((len(lengths), width), -1.0) * attention_BT,
        group_B=torch.arange(len(lengths)),
        finished_B=torch.tensor(finished or [True] * len(lengths)),
        version=0,
    )


@dataclass
class FakePolicy:
    logp_BT: Tensor
    approx_kl: float = 0.0
    updates: list[tuple[Experience, Per]] = field(default_factory=list[tuple[Experience, Per]])
    items: list[ItemLoss] = field(default_factory=list[ItemLoss])

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.logp_BT

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics:
        self.updates.append((experience, per))
        self.items.append(loss(experience.old_logp_BT, torch.zeros_like(experience.old_logp_BT), experience))
        return {"loss": 1.0, "approx_kl": self.approx_kl, "ratio_max": float(len(self.updates)), "entropy": 0.5}


@dataclass
class FakeCritic:
    values_BT: Tensor
    updates: list[ValueTargets] = field(default_factory=list[ValueTargets])

    def values(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.values_BT

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> Metrics:
        del per
        self.updates.append(targets)
        return {"loss": loss(targets.old_values_BT, targets).loss_BT.sum().item()}


@dataclass
class Still:
    answer: Tensor

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.answer

    def score(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self.answer


class Here:
    def gather(self, *calls: Callable[[], Any], phase: str = "judge") -> list[Any]:
        del phase
        return [call() for call in calls]


@dataclass
class Notes:
    learnt_: list[int] = field(default_factory=list[int])
    dropped_: list[str] = field(default_factory=list[str])

    def learnt(self, number: int, evaluated: EvaluatedRollouts, metrics: Metrics) -> None:
        del evaluated, metrics
        self.learnt_.append(number)

    def dropped(self, number: int, rollouts: Rollouts, error: NumericsError) -> None:
        del rollouts
        self.dropped_.append(f"{number}: {error}")


def roles_for(rollouts: Rollouts, scores: list[float], *, gap: float = 0.5) -> PPORoles:
    """The policy is `gap` nats a token more sure than the reference; the critic foresees 1 everywhere."""
    mask_BT = rollouts.response_mask_BT
    logp_BT = torch.full(mask_BT.shape, -1.0) * mask_BT
    return PPORoles(
        policy=FakePolicy(logp_BT),
        critic=FakeCritic(1.0 * mask_BT),
        reference=Still(logp_BT - gap * mask_BT),
        reward=Still(torch.tensor(scores)),
    )


def run(
    rollouts: Rollouts, roles: PPORoles, cfg: PPOConfig, *, number: int = 0, kl: KLController | None = None
) -> tuple[EvaluatedRollouts, Metrics]:
    return iteration(rollouts, roles, cfg, kl or kl_controller(cfg.kl), RewardShaper(), Here(), number=number, seed=5)


PLAIN = PPOConfig(
    kl=KLSettings(start=0.2),
    credit=CreditSettings(lam=0.5, gamma=1.0, whiten_advantages=False),
    epochs=1,
    minibatches=1,
    max_new_tokens=8,
)


def test_rewards_advantages_and_returns_by_hand() -> None:
    """Two response tokens, score 3, kl 0.5 a token at 0.2: rewards -0.1 and 2.9; values 1; lam 0.5.

    A_2 = 2.9 - 1 = 1.9;  A_1 = (-0.1 + 1 - 1) + 0.5 * 1.9 = 0.85;  returns = A + 1.
    """
    rollouts = rollouts_of([2])
    roles = roles_for(rollouts, [3.0])
    _, metrics = run(rollouts, roles, PLAIN)
    assert isinstance(roles.policy, FakePolicy)
    assert isinstance(roles.critic, FakeCritic)
    (experience, per), targets = roles.policy.updates[0], roles.critic.updates[0]
    assert per == "token"
    assert_close(experience.advantages_BT, torch.tensor([[0.0, 0.0, 0.85, 1.9]]))
    assert_close(targets.returns_BT, torch.tensor([[0.0, 0.0, 1.85, 2.9]]))
    assert metrics["kl/mean"] == pytest.approx(1.0)
    assert metrics["reward/mean"] == 3.0
    assert metrics["policy/mismatch"] == 0.0
    assert metrics["length/mean"] == 2.0
    assert metrics["kl/coef"] == 0.2
    assert metrics["entropy/mean"] == 0.5


def test_sampled_log_probs_are_the_generators_and_the_policy_is_not_asked() -> None:
    """The generator noted -1 a token, and garbage on the prompt; the policy would say -7, the reference says -1.5."""
    rollouts = rollouts_of([2])
    noted_BT = torch.tensor([[9.0, 9.0, -1.0, -1.0]])
    roles = replace(roles_for(rollouts, [3.0]), policy=FakePolicy(torch.full((1, 4), -7.0)))
    cfg = PLAIN.model_copy(update={"policy": PolicyLossSettings(old_logprobs="sampled")})
    _, metrics = run(replace(rollouts, behaviour_logp_BT=noted_BT), roles, cfg)
    assert isinstance(roles.policy, FakePolicy)
    (experience, _) = roles.policy.updates[0]
    assert experience.old_logp_BT.tolist() == [[0.0, 0.0, -1.0, -1.0]]
    assert_close(experience.advantages_BT, torch.tensor([[0.0, 0.0, 0.85, 1.9]]))  # as above: the same KL
    assert metrics["kl/mean"] == pytest.approx(1.0)
    assert "policy/mismatch" not in metrics


def test_answers_of_other_weights_count_by_their_ratio_and_those_far_from_the_policy_leave() -> None:
    """The policy says -1 a token. Whoever sampled said ln 1.5 less of answer 1, ln 9 less of answer 2."""
    rollouts = rollouts_of([2, 2, 2])
    gap_B1 = torch.tensor([1.0, 1.5, 9.0]).log()[:, None]
    rollouts = replace(rollouts, behaviour_logp_BT=rollouts.behaviour_logp_BT - gap_B1)
    roles = roles_for(rollouts, [3.0, 2.0, 1.0])
    correct = CorrectionSettings(cap=1.4, drop=(0.5, 2.0))
    _, metrics = run(rollouts, roles, PLAIN.model_copy(update={"correct": correct}))
    assert isinstance(roles.policy, FakePolicy)
    assert isinstance(roles.critic, FakeCritic)
    ((experience, _), targets) = roles.policy.updates[0], roles.critic.updates[0]
    assert experience.weight_BT is not None
    in_order = experience.rollouts.group_B.argsort()
    assert_close(experience.weight_BT[in_order, 2:], torch.tensor([[1.0, 1.0], [1.4, 1.4]]))
    assert sorted(targets.rollouts.group_B.tolist()) == [0, 1]
    assert metrics["correct/dropped"] == pytest.approx(1 / 3)
    assert metrics["correct/capped"] == pytest.approx(2 / 3)
    assert metrics["reward/mean"] == 2.0  # of all that were sampled
    assert metrics["kl/mean"] == pytest.approx((1.0 + 1.4 + 1.4) / 3)  # two tokens of 0.5 nats each


def test_the_kl_may_be_paid_in_the_loss_instead() -> None:
    rollouts = rollouts_of([2])
    cfg = PLAIN.model_copy(update={"kl": KLSettings(start=0.2, where="loss", kind="k2")})
    roles = roles_for(rollouts, [3.0])
    run(rollouts, roles, cfg)
    assert isinstance(roles.policy, FakePolicy)
    experience, _ = roles.policy.updates[0]
    assert_close(experience.advantages_BT, torch.tensor([[0.0, 0.0, 1.0, 2.0]]))  # A_2 = 3 - 1; A_1 = 0 + 0.5 * 2
    # ratio 1: the loss is -A + 0.2 * 0.5^2 / 2
    assert_close(roles.policy.items[0].loss_BT[0, 2:], torch.tensor([-0.975, -1.975]))


def test_the_entropy_bonus_and_the_clips_reach_the_loss() -> None:
    policy = PolicyLossSettings(clip=0.1, clip_high=0.5, dual_clip=2.0, entropy=0.3)
    cfg = PLAIN.model_copy(update={"policy": policy})
    rollouts = rollouts_of([3])
    old_BT = torch.zeros(1, 5)
    experience = Experience(
        rollouts=rollouts,
        old_logp_BT=old_BT,
        ref_logp_BT=old_BT,
        advantages_BT=torch.tensor([[0.0, 0.0, 1.0, 1.0, -1.0]]),
    )
    logp_BT = torch.tensor([[1.0, 1.0, 1.4, 2.0, 4.0]]).log()
    item = actor_loss(logp_BT, torch.full((1, 5), 2.0), experience, cfg=cfg, coef=9.0)
    # gains: 1.4 (free, below 1.5), 1.5 (clipped above), -2 (dual clip of -4); each with 0.3 * 2 of entropy
    assert_close(item.loss_BT[0, 2:], torch.tensor([-1.4, -1.5, 2.0]) - 0.6)


def test_advantages_are_whitened_over_the_whole_batch() -> None:
    rollouts = rollouts_of([1, 3, 2, 2])
    roles = roles_for(rollouts, [1.0, -2.0, 0.5, 4.0])
    cfg = PLAIN.model_copy(update={"credit": CreditSettings(), "minibatches": 2})
    run(rollouts, roles, cfg)
    assert isinstance(roles.policy, FakePolicy)
    parts = [one for one, _ in roles.policy.updates]
    flat = torch.cat([one.advantages_BT[one.rollouts.response_mask_BT] for one in parts])
    assert len(flat) == 8
    assert_close(flat.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert_close(flat.std(correction=0), torch.tensor(1.0), rtol=1e-4, atol=0)


def test_rows_without_a_score_are_left_out_and_counted() -> None:
    rollouts = rollouts_of([2, 3, 1])
    roles = roles_for(rollouts, [1.0, NAN, 5.0])
    evaluated, metrics = run(rollouts, roles, PLAIN)
    assert evaluated.rollouts.group_B.tolist() == [0, 2]
    assert metrics["reward/mean"] == 3.0
    assert metrics["reward/unscored"] == pytest.approx(1 / 3)
    assert isinstance(roles.policy, FakePolicy)
    assert roles.policy.updates[0][0].rollouts.tokens_BT.shape[0] == 2


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ({"scores_B": torch.tensor([NAN, NAN])}, "reward: none of the 2 answers has a score"),
        ({"scores_B": torch.tensor([1.0, math.inf])}, "reward: 1 of 2 are not finite, first inf at row 1"),
        (
            {"old_logp_BT": torch.tensor([[NAN, 0, 0, 0], [0, 0, 0, NAN]])},
            "policy log-prob: 1 .* at row 1, token 3",
        ),
        (
            {"ref_logp_BT": torch.tensor([[0, 0, -math.inf, 0], [0, 0, 0, 0]])},
            "reference log-prob: 1 .* -inf at row 0",
        ),
        ({"values_BT": torch.tensor([[0, 0, NAN, 0], [0, 0, 0, 0]])}, "value: 1 of 8 are not finite"),
    ],
)
def test_what_is_not_finite_is_named(poison: dict[str, Tensor], message: str) -> None:
    """A NaN in the prompt (the first one above) is nobody's business."""
    zeros_BT = torch.zeros(2, 4)
    sound = EvaluatedRollouts(
        rollouts=rollouts_of([2, 2]),
        scores_B=torch.zeros(2),
        old_logp_BT=zeros_BT,
        ref_logp_BT=zeros_BT,
        values_BT=zeros_BT,
    )
    assert check_finite(drop_unscored(sound)) is sound
    with pytest.raises(NumericsError, match=message):
        check_finite(drop_unscored(replace(sound, **poison)))


def test_a_bad_batch_is_refused_before_anything_is_learnt() -> None:
    rollouts = rollouts_of([2, 2])
    roles = replace(roles_for(rollouts, [1.0, 2.0]), reward=Still(torch.tensor([NAN, NAN])))
    with pytest.raises(NumericsError, match="reward: none of the 2 answers"):
        run(rollouts, roles, PLAIN)
    assert isinstance(roles.policy, FakePolicy)
    assert roles.policy.updates == []


def test_a_broken_budget_stops_before_anything_is_learnt() -> None:
    rollouts = rollouts_of([4, 2])  # kl 2 and 1: 1.5 on average
    roles = roles_for(rollouts, [1.0, 2.0])
    tight = PLAIN.model_copy(update={"kl": KLSettings(start=0.2, limit=1.4)})
    with pytest.raises(KLExceeded, match=r"1\.5 nats a sequence, over the limit of 1\.4") as caught:
        run(rollouts, roles, tight)
    assert (caught.value.kl, caught.value.limit) == (1.5, 1.4)
    assert isinstance(roles.policy, FakePolicy)
    assert roles.policy.updates == []
    run(rollouts, roles, PLAIN.model_copy(update={"kl": KLSettings(start=0.2, limit=1.6)}))
    assert len(roles.policy.updates) == 1


def test_while_the_critic_warms_up_the_policy_does_not_learn() -> None:
    rollouts = rollouts_of([2, 2])
    cfg = PLAIN.model_copy(update={"critic_warmup": 2, "epochs": 3})
    for number, expected in ((1, 0), (2, 3)):
        roles = roles_for(rollouts, [1.0, 2.0])
        run(rollouts, roles, cfg, number=number)
        assert isinstance(roles.policy, FakePolicy)
        assert isinstance(roles.critic, FakeCritic)
        assert (len(roles.policy.updates), len(roles.critic.updates)) == (expected, 3)


def test_passes_end_early_when_a_step_went_too_far() -> None:
    rollouts = rollouts_of([2, 2])
    cfg = PLAIN.model_copy(update={"epochs": 4, "policy": PolicyLossSettings(stop_at_kl=0.015)})
    for approx_kl, expected in ((0.016, 1), (0.014, 4)):
        roles = roles_for(rollouts, [1.0, 2.0])
        assert isinstance(roles.policy, FakePolicy)
        roles.policy.approx_kl = approx_kl
        run(rollouts, roles, cfg)
        assert len(roles.policy.updates) == expected


def test_the_coefficient_is_steered_after_the_batch_that_paid_it() -> None:
    rollouts = rollouts_of([2, 2])  # kl 1 a sequence, half of the target
    cfg = PLAIN.model_copy(update={"kl": KLSettings(start=0.2, target=2.0, horizon=10)})
    kl = kl_controller(cfg.kl)
    _, metrics = run(rollouts, roles_for(rollouts, [1.0, 2.0]), cfg, kl=kl)
    assert metrics["kl/coef"] == 0.2
    assert kl.coef == pytest.approx(0.2 * (1 - 0.2 * 2 / 10))
    again = kl_controller(cfg.kl)
    again.load(kl.state())
    assert again.coef == kl.coef


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ScoreSettings(), [1.0, 5.0]),
        (ScoreSettings(clip=2.0), [1.0, 2.0]),
        (ScoreSettings(normalise="standard"), [-1.0, 1.0]),
        (ScoreSettings(normalise="scale"), [0.5, 2.5]),
        (ScoreSettings(missing_eos_penalty=3.0), [1.0, 2.0]),
        (ScoreSettings(missing_eos_score=-1.0), [1.0, -1.0]),
        (ScoreSettings(normalise="scale", clip=2.0, missing_eos_penalty=0.5), [0.5, 1.5]),
        # lengths 2 and 7 of at most 8, a buffer of 4: 0 and -(7 - 4) / 4
        (ScoreSettings(overlong_buffer=4, overlong_penalty=2.0), [1.0, 3.5]),
        # too short by 1, too long by 2
        (ScoreSettings(length=LengthPrice(price=0.5, least=3, most=5)), [0.5, 4.0]),
    ],
)
def test_scores_are_shaped_in_order(settings: ScoreSettings, expected: list[float]) -> None:
    zeros_BT = torch.zeros(2, 9)
    evaluated = EvaluatedRollouts(
        rollouts=rollouts_of([2, 7], finished=[True, False]),
        scores_B=torch.tensor([1.0, 5.0]),
        old_logp_BT=zeros_BT,
        ref_logp_BT=zeros_BT,
        values_BT=zeros_BT,
    )
    cfg = PLAIN.model_copy(update={"scores": settings})
    shaper = RewardShaper()
    assert_close(shaper.shape_scores(evaluated, cfg), torch.tensor(expected))
    assert (shaper.moments.count, shaper.moments.mean) == (2, 3.0)


def test_minibatches_are_new_permutations_of_all_rows() -> None:
    cfg = PLAIN.model_copy(update={"epochs": 2, "minibatches": 3})
    parts = [part.tolist() for part in minibatches(7, cfg, seed=1)]
    assert [len(part) for part in parts] == [3, 2, 2, 3, 2, 2]
    first, second = (list(chain.from_iterable(some)) for some in (parts[:3], parts[3:]))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert [part.tolist() for part in minibatches(7, cfg, seed=1)] == parts
    assert [part.tolist() for part in minibatches(2, cfg, seed=2)] != [[], [], []]


def test_explained_variance_by_hand() -> None:
    """Returns 1, 3 (variance 1), values 1, 2: the rest 0, 1 has variance 1/4."""
    targets = ValueTargets(
        rollouts=rollouts_of([2]),
        old_values_BT=torch.tensor([[9.0, 9.0, 1.0, 2.0]]),
        returns_BT=torch.tensor([[7.0, 7.0, 1.0, 3.0]]),
    )
    assert explained_variance(targets) == {"value/explained_variance": 0.75}
    flat = replace(targets, returns_BT=torch.ones(1, 4))
    assert explained_variance(flat) == {"value/explained_variance": 0.0}


def test_facts_over_steps() -> None:
    assert mean_over_steps([{"a": 1.0, "ratio_max": 3.0}, {"a": 2.0, "b": 5.0, "ratio_max": 2.0}]) == {
        "a": 1.5,
        "b": 5.0,
        "ratio_max": 3.0,
    }
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 1, -1])) == pytest.approx(-1.0)
    assert correlation(torch.tensor([1.0, 1.0]), torch.tensor([3, 1])) == 0.0


def test_measures_of_text_are_of_the_answers_alone_and_means_over_them() -> None:
    """Answers 1 1 1 1 1 1 (its three 4-grams are one: two of three repeat) and 2 3 4 5 6 7, after equal prompts."""
    rollouts = rollouts_of([6, 6])
    tokens_BT = torch.tensor([[9, 9, 1, 1, 1, 1, 1, 1], [9, 9, 2, 3, 4, 5, 6, 7]])
    metrics = text_metrics(replace(rollouts, tokens_BT=tokens_BT))
    assert metrics["repetition/mean"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics["distinct/mean"] == pytest.approx((1 + 5) / 10)
    assert metrics["similarity/mean"] == 0.0


def test_the_first_optimiser_step_stands_beside_the_means() -> None:
    """Three steps of the policy with the critic between them: means over all, and the first as it was."""
    steps = [
        {"value/loss": 4.0},
        {"entropy/mean": 0.9, "policy/approx_kl": 0.0, "policy/clip_fraction": 0.0, "policy/ratio_max": 1.0},
        {"value/loss": 2.0},
        {"entropy/mean": 0.6, "policy/approx_kl": 0.03, "policy/clip_fraction": 0.3, "policy/ratio_max": 1.5},
    ]
    metrics = mean_over_steps(steps)
    assert metrics["entropy/mean"] == pytest.approx(0.75)
    assert (metrics["entropy/first"], metrics["policy/approx_kl_first"], metrics["policy/clip_fraction_first"]) == (
        0.9,
        0.0,
        0.0,
    )
    assert metrics["policy/approx_kl"] == pytest.approx(0.015)
    assert "entropy/first" not in mean_over_steps([{"value/loss": 4.0}])
