"""What holds for every way to hold the roles, and what is special to each."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from kedge.core.errors import CheckpointError, ModelError
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience, Rollouts, ValueTargets, take
from kedge.models.forward.lora import base_of
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.models.reward.reward_files import load
from kedge.models.roles.build import RoleSet, RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.rollout.local import LocalGenerator
from kedge.rollout.prompts import repeated
from kedge.rollout.settings import SamplingSettings

BuildRoles = Callable[[RoleSpec], RoleSet]


def likelihood(logp_BT: Tensor, entropy_BT: Tensor, experience: Experience) -> ItemLoss:
    """Raises what has an advantage; asymmetric in tokens and rows."""
    return ItemLoss(loss_BT=-logp_BT * experience.advantages_BT - 0.1 * entropy_BT, stats_BT={})


def squared(values_BT: Tensor, targets: ValueTargets) -> ItemLoss:
    return ItemLoss(loss_BT=(values_BT - targets.returns_BT).square(), stats_BT={})


def experience_of(rollouts: Rollouts) -> Experience:
    zeros_BT = torch.zeros(rollouts.tokens_BT.shape)
    weight_BT = torch.linspace(-1, 2, zeros_BT.numel()).reshape(zeros_BT.shape)
    return Experience(rollouts=rollouts, old_logp_BT=zeros_BT, ref_logp_BT=zeros_BT, advantages_BT=weight_BT)


def targets_of(rollouts: Rollouts) -> ValueTargets:
    zeros_BT = torch.zeros(rollouts.tokens_BT.shape)
    return ValueTargets(rollouts=rollouts, old_values_BT=zeros_BT, returns_BT=experience_of(rollouts).advantages_BT)


@torch.no_grad()
def by_transformers(folder: str, rollouts: Rollouts, temperature: float) -> Tensor:
    """Log-probs of the response by plain transformers, row by row, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found_BT = torch.zeros(rollouts.tokens_BT.shape)
    for row, length in enumerate(rollouts.attention_mask_BT.sum(dim=1).tolist()):
        tokens_T = rollouts.tokens_BT[row, :length]
        logp_TV = (model(tokens_T[None]).logits[0].float() / temperature).log_softmax(-1)
        found_BT[row, 1:length] = logp_TV[:-1].gather(1, tokens_T[1:, None])[:, 0]
    return found_BT * rollouts.response_mask_BT


def test_before_the_first_step_policy_and_reference_are_the_model_itself(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts
) -> None:
    roles = build_roles(spec)
    policy_BT, reference_BT = roles.policy.logprobs(rollouts), roles.reference.logprobs(rollouts)
    assert torch.equal(policy_BT, reference_BT)
    assert_close(policy_BT, by_transformers(spec.base, rollouts, 0.7), rtol=1e-4, atol=1e-5)


def test_the_model_that_samples_and_the_role_that_learns_agree(build_roles: BuildRoles, spec: RoleSpec) -> None:
    roles = build_roles(replace(spec, actor=spec.actor.model_copy(update={"lr": 0.05})))
    generator = LocalGenerator(
        base_of(roles.model), SamplingSettings(max_new_tokens=6, temperature=0.7), stop_ids=[258], pad=256, max_rows=4
    )
    prompts = repeated([[70, 71, 72], [80]], ids=[0, 1], answers=2)
    first = generator.generate(prompts, seed=1)
    roles.policy.update(experience_of(first), likelihood, per="token")
    moved = generator.generate(prompts, seed=1)
    assert not torch.equal(roles.policy.logprobs(moved), roles.reference.logprobs(moved))
    assert_close(roles.policy.logprobs(moved), moved.behaviour_logp_BT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_micro_batches_and_the_order_of_rows_do_not_change_the_gradient(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts, rows: int
) -> None:
    optimiser = spec.actor.model_copy(update={"clip": 1e9})
    wide = replace(spec, actor=optimiser, critic=optimiser, rows=16)

    def gradients(roles: RoleSet, order_B: Tensor) -> dict[str, Tensor]:
        roles.policy.update(take(experience_of(rollouts), order_B), likelihood, per="sequence")
        roles.critic.update(take(targets_of(rollouts), order_B), squared, per="token")
        named = [*roles.policy.train_step.named, *roles.critic.train_step.named]
        return {f"{index}.{name}": one.grad for index, (name, one) in enumerate(named) if one.grad is not None}

    whole = gradients(build_roles(wide), torch.arange(6))
    cut = gradients(build_roles(replace(wide, rows=rows)), torch.tensor([3, 0, 5, 1, 4, 2]))
    assert whole
    assert whole.keys() == cut.keys()
    for name, grad in whole.items():
        assert_close(cut[name], grad, rtol=1e-4, atol=1e-6)


def test_state_brings_everything_back(build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts) -> None:
    spec = replace(spec, ema=0.5)
    roles = build_roles(spec)
    for _ in range(2):
        roles.policy.update(experience_of(rollouts), likelihood, per="token")
        roles.critic.update(targets_of(rollouts), squared, per="token")
    again = build_roles(spec)
    again.load(deepcopy(roles.state()))  # on disk it is a copy, too
    for one in (roles, again):
        one.policy.update(experience_of(rollouts), likelihood, per="token")
        one.critic.update(targets_of(rollouts), squared, per="token")
    assert torch.equal(roles.policy.logprobs(rollouts), again.policy.logprobs(rollouts))
    assert torch.equal(roles.critic.values(rollouts), again.critic.values(rollouts))
    for name, one in roles.policy.final_weights().items():
        assert torch.equal(one, again.policy.final_weights()[name])


def test_another_reference_is_refused(build_roles: BuildRoles, spec: RoleSpec) -> None:
    roles = build_roles(spec)
    with pytest.raises(CheckpointError, match="reference of this run had the content hash deadbeef"):
        roles.load({**roles.state(), "reference": "deadbeef"})


def test_what_is_saved_is_the_policy_and_with_an_average_the_average(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts, tmp_path: Path
) -> None:
    roles, averaged = build_roles(spec), build_roles(replace(spec, ema=0.75))
    before = {name: one.clone() for name, one in averaged.policy.train_step.weights().items()}
    for one in (roles, averaged):
        one.policy.update(experience_of(rollouts), likelihood, per="token")
    saved = load_causal(roles.save(tiny_tokenizer(), tmp_path / "last"), dtype="float32")
    assert_close(
        by_transformers(str(tmp_path / "last"), rollouts, 0.7), roles.policy.logprobs(rollouts), rtol=1e-4, atol=1e-5
    )
    assert module_hash(saved) != roles.reference_hash
    for name, one in averaged.policy.final_weights().items():
        assert_close(one, 0.75 * before[name] + 0.25 * averaged.policy.train_step.weights()[name])
    now = {name: one.clone() for name, one in averaged.policy.train_step.weights().items()}
    averaged.save(tiny_tokenizer(), tmp_path / "average")
    for name, one in averaged.policy.train_step.weights().items():
        assert torch.equal(one, now[name])
    moved = by_transformers(str(tmp_path / "average"), rollouts, 0.7)
    assert not torch.allclose(moved, by_transformers(str(tmp_path / "last"), rollouts, 0.7))


def test_the_critic_learns_alone_and_the_policy_alone(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts
) -> None:
    roles = build_roles(spec)
    policy_BT, values_BT = roles.policy.logprobs(rollouts), roles.critic.values(rollouts)
    assert not values_BT.any()  # a head of zeros
    roles.critic.update(targets_of(rollouts), squared, per="token")
    assert torch.equal(roles.policy.logprobs(rollouts), policy_BT)
    values_BT = roles.critic.values(rollouts)
    assert values_BT.any()
    roles.policy.update(experience_of(rollouts), likelihood, per="token")
    assert torch.equal(roles.critic.values(rollouts), values_BT)
    assert torch.equal(roles.reference.logprobs(rollouts), policy_BT)


def test_lora_leaves_the_base_alone(spec: RoleSpec, rollouts: Rollouts) -> None:
    roles = lora(spec)
    plain = separate(spec)
    for _ in range(20):
        roles.policy.update(experience_of(rollouts), likelihood, per="token")
        roles.critic.update(targets_of(rollouts), squared, per="token")
    assert torch.equal(roles.reference.logprobs(rollouts), plain.reference.logprobs(rollouts))
    assert module_hash(base_of(roles.model)) == roles.reference_hash == plain.reference_hash
    assert not torch.allclose(roles.policy.logprobs(rollouts), plain.reference.logprobs(rollouts))


def test_the_trunk_stays_and_is_computed_once_for_all(spec: RoleSpec, rollouts: Rollouts) -> None:
    roles = trunk(spec)
    lower = {name: one.clone() for name, one in roles.model.named_parameters() if ".layers.0." in name}
    calls: list[int] = []
    lowest: Any = roles.model.get_submodule("model.layers.0")
    lowest.register_forward_hook(lambda *found: calls.append(found[2].shape[:2].numel()))
    roles.policy.logprobs(rollouts)
    roles.reference.logprobs(rollouts)
    roles.critic.values(rollouts)
    roles.policy.update(take(experience_of(rollouts), torch.tensor([4, 1])), likelihood, per="token")
    assert sum(calls) == 49  # tokens: each once, without padding
    roles.forget()
    roles.reference.logprobs(rollouts)
    assert sum(calls) == 98
    for name, one in roles.model.named_parameters():
        if name in lower:
            assert torch.equal(one, lower[name])
    assert len(lower) == 9


def test_a_trunk_of_all_layers_is_refused(spec: RoleSpec) -> None:
    with pytest.raises(ModelError, match="found 3 shared layers, expected 1 to 2"):
        trunk(replace(spec, trunk_layers=3))


@pytest.mark.parametrize(("way", "reward"), [(lora, "lora_reward"), (trunk, "frozen_reward")])
def test_a_reward_model_that_shares_weights_scores_as_by_itself(
    way: BuildRoles, reward: str, spec: RoleSpec, rollouts: Rollouts, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(reward)
    roles = way(replace(spec, reward=folder))
    assert roles.shared_judge is not None
    (member,) = roles.shared_judge.members
    own = load(folder, dtype="float32")
    expected_BK = own.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT)
    for _ in range(3):  # whatever the others learn
        roles.policy.update(experience_of(rollouts), likelihood, per="token")
        roles.critic.update(targets_of(rollouts), squared, per="token")
    assert_close(member.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT), expected_BK, rtol=1e-4, atol=1e-5)
    assert len({round(one, 3) for one in expected_BK[:, 0].tolist()}) == 6


@pytest.mark.parametrize(
    ("way", "reward"),
    [(separate, "lora_reward"), (separate, "frozen_reward"), (lora, "lora_reward"), (trunk, "frozen_reward")],
)
def test_the_critic_starts_as_the_reward_model(
    way: BuildRoles, reward: str, spec: RoleSpec, rollouts: Rollouts, request: pytest.FixtureRequest
) -> None:
    """The value of a prefix is the normalised score that it would have as a text of its own."""
    folder: Path = request.getfixturevalue(reward)
    values_BT = way(replace(spec, reward=folder)).critic.values(rollouts)
    own = load(folder, dtype="float32")
    for row, at in ((0, 2), (2, 11), (5, 3)):
        prefix_BT = rollouts.tokens_BT[row : row + 1, :at]
        score = own.score_tokens(prefix_BT, torch.ones_like(prefix_BT, dtype=torch.bool))[0, 0]
        assert_close(values_BT[row, at], score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("way", "reward"), [(lora, "frozen_reward"), (trunk, "lora_reward")])
def test_a_reward_model_of_other_weights_is_held_by_itself_and_the_note_says_so(
    way: BuildRoles, reward: str, spec: RoleSpec, request: pytest.FixtureRequest
) -> None:
    roles = way(replace(spec, reward=request.getfixturevalue(reward)))
    assert roles.shared_judge is None
    assert "is held as a model of its own" in roles.notes[0]


def test_recomputed_activations_give_the_same_step(build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts) -> None:
    plain, frugal = build_roles(spec), build_roles(replace(spec, recompute=True))
    for roles in (plain, frugal):
        roles.policy.update(experience_of(rollouts), likelihood, per="token")
        roles.critic.update(targets_of(rollouts), squared, per="token")
    assert_close(frugal.policy.logprobs(rollouts), plain.policy.logprobs(rollouts), rtol=1e-5, atol=1e-6)
    assert_close(frugal.critic.values(rollouts), plain.critic.values(rollouts), rtol=1e-5, atol=1e-6)


def test_the_memory_table_counts_what_learns(spec: RoleSpec) -> None:
    by_role = {row.role: row for row in separate(spec).memory}
    weights = sum(one.numel() for one in load_causal(spec.base, dtype="float32").parameters())
    assert by_role["actor"].learns == weights
    assert by_role["actor"].own_bytes == by_role["reference"].own_bytes == 4 * weights
    assert by_role["actor"].learning_bytes == 12 * weights
    assert by_role["critic"].learns == weights + 32 + 1
    adapted = {row.role: row for row in lora(spec).memory}
    assert adapted["base"].own_bytes == 4 * weights
    assert adapted["reference"].own_bytes == 0
    assert 0 < adapted["actor"].learns < weights / 4
    shared = {row.role: row for row in trunk(spec).memory}
    assert shared["trunk"].own_bytes + shared["actor"].own_bytes == 4 * weights


def test_more_rows_are_asked_at_once_where_learning_holds_more_than_one_layer(spec: RoleSpec) -> None:
    on_gpu = replace(spec, device="cuda:1", rows=4)
    found = [one.inference_rows for one in (spec, on_gpu, replace(on_gpu, recompute=True))]
    assert found == [spec.rows, 16, 4]
