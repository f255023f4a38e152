"""The three ways to build the roles: what each shares, starts from and counts. The contract has what all promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from kedge.core.errors import CheckpointError, ModelError
from kedge.core.records import Rollouts, repeated, take
from kedge.models.forward import backbones, reader
from kedge.models.forward.reader import Reader
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.loading.start import save_causal
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.models.reward.reward_files import load
from kedge.models.roles.actor_critic import Critic, RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.testing.contracts.roles import (
    example_experience,
    example_targets,
    squared_error,
    transformers_logprobs,
    update_critic,
    update_policy,
    weighted_likelihood,
)

BuildRoles = Callable[[RoleSpec], RoleSet]


def test_the_model_that_samples_and_the_role_that_learns_agree(build_roles: BuildRoles, spec: RoleSpec) -> None:
    roles = build_roles(replace(spec, actor=spec.actor.model_copy(update={"lr": 0.05})))
    generator = LocalGenerator(
        roles.model, SamplingSettings(max_new_tokens=6, temperature=0.7), stop_ids=[258], pad=256, max_rows=4
    )
    prompts = repeated([[70, 71, 72], [80]], ids=[0, 1], answers=2)
    first = generator.generate(prompts, seed=1)
    update_policy(roles, first)
    second = generator.generate(prompts, seed=1)
    assert not torch.equal(roles.policy.logprobs(second), roles.reference.logprobs(second))
    assert_close(roles.policy.logprobs(second), second.behaviour_logp_BT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_micro_batches_and_the_order_of_rows_do_not_change_the_gradient(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts, rows: int
) -> None:
    optimiser = spec.actor.model_copy(update={"clip": 1e9})
    wide = replace(spec, actor=optimiser, critic=optimiser, rows=16)

    def gradients(roles: RoleSet, order_B: Tensor) -> dict[str, Tensor]:
        roles.policy.update(take(example_experience(rollouts), order_B), weighted_likelihood, per="sequence")
        roles.critic.update(take(example_targets(rollouts), order_B), squared_error, per="token")
        named = [*roles.policy.train_step.named, *roles.critic.train_step.named]
        grads = {f"{index}.{name}": parameter.grad for index, (name, parameter) in enumerate(named)}
        return {name: grad for name, grad in grads.items() if grad is not None}

    whole = gradients(build_roles(wide), torch.arange(6))
    in_parts = gradients(build_roles(replace(wide, rows=rows)), torch.tensor([3, 0, 5, 1, 4, 2]))
    assert whole
    assert whole.keys() == in_parts.keys()
    for name, grad in whole.items():
        assert_close(in_parts[name], grad, rtol=1e-4, atol=1e-6)


def test_another_reference_is_refused(build_roles: BuildRoles, spec: RoleSpec) -> None:
    roles = build_roles(spec)
    with pytest.raises(CheckpointError, match="reference of this run had the content hash deadbeef"):
        roles.load({**roles.state(), "reference": "deadbeef"})


def test_with_an_average_the_average_is_saved(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts, tmp_path: Path
) -> None:
    roles = build_roles(replace(spec, ema=0.75))
    before = {name: weight.clone() for name, weight in roles.policy.weights().items()}
    update_policy(roles, rollouts)
    last = {name: weight.clone() for name, weight in roles.policy.weights().items()}
    for name, weight in roles.policy.final_weights().items():
        assert_close(weight, 0.75 * before[name] + 0.25 * last[name])
    average = roles.policy.final_weights()
    folder = save_causal(roles.model, tiny_tokenizer(), tmp_path / "ema", weights=average)
    saved_BT = transformers_logprobs(folder, rollouts, 0.7)
    for name, weight in roles.policy.weights().items():
        assert torch.equal(weight, last[name])
    assert not torch.allclose(saved_BT, roles.policy.logprobs(rollouts))
    train_step = roles.policy.train_step
    train_step.load(train_step.state() | {"weights": average})
    assert_close(saved_BT, roles.policy.logprobs(rollouts), rtol=1e-4, atol=1e-5)


def test_without_a_reward_model_values_start_at_zero(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts
) -> None:
    assert not build_roles(spec).critic.values(rollouts).any()


def test_lora_leaves_the_base_alone(spec: RoleSpec, rollouts: Rollouts) -> None:
    roles = lora(spec)
    plain = separate(spec)
    for _ in range(20):
        update_policy(roles, rollouts)
        update_critic(roles, rollouts)
    assert torch.equal(roles.reference.logprobs(rollouts), plain.reference.logprobs(rollouts))
    assert module_hash(roles.model) == roles.reference_hash == plain.reference_hash
    assert not torch.allclose(roles.policy.logprobs(rollouts), plain.reference.logprobs(rollouts))


def test_the_trunk_stays_and_is_computed_once_for_all(spec: RoleSpec, rollouts: Rollouts) -> None:
    roles = trunk(spec)
    lower = {name: weight.clone() for name, weight in roles.model.named_parameters() if ".layers.0." in name}
    calls: list[int] = []
    lowest: Any = roles.model.get_submodule("model.layers.0")
    lowest.register_forward_hook(lambda *call: calls.append(call[2].shape[:2].numel()))
    roles.policy.logprobs(rollouts)
    roles.reference.logprobs(rollouts)
    roles.critic.values(rollouts)
    roles.policy.update(take(example_experience(rollouts), torch.tensor([4, 1])), weighted_likelihood, per="token")
    assert sum(calls) == 49  # tokens: each once, without padding
    roles.forget()
    roles.reference.logprobs(rollouts)
    assert sum(calls) == 98
    for name, weight in roles.model.named_parameters():
        if name in lower:
            assert torch.equal(weight, lower[name])
    assert len(lower) == 9


def test_a_trunk_of_all_layers_is_refused(spec: RoleSpec) -> None:
    with pytest.raises(ModelError, match="found 3 shared layers, expected 1 to 2"):
        trunk(replace(spec, trunk_layers=3))


@pytest.mark.parametrize(("builder", "reward"), [(lora, "lora_reward"), (trunk, "frozen_reward")])
def test_a_reward_model_that_shares_weights_scores_as_by_itself(
    builder: BuildRoles, reward: str, spec: RoleSpec, rollouts: Rollouts, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(reward)
    roles = builder(replace(spec, reward=folder))
    assert roles.shared_judge is not None
    (member,) = roles.shared_judge.members
    by_itself = load(folder, dtype="float32")
    expected_BK = by_itself.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT)
    for _ in range(3):  # whatever the others learn
        update_policy(roles, rollouts)
        update_critic(roles, rollouts)
    assert_close(member.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT), expected_BK, rtol=1e-4, atol=1e-5)
    assert len({round(score, 3) for score in expected_BK[:, 0].tolist()}) == 6


def test_layers_are_compiled_before_a_reward_model_on_them_reads_them(
    spec: RoleSpec, lora_reward: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which path a reader takes (graphs, on a GPU) depends on it."""
    were_compiled = dict[int, bool]()

    def reader_of(decoder: Any, **options: Any) -> Reader:
        chosen = reader.reader_of(decoder, **options)
        were_compiled[id(chosen)] = all(layer._compiled_call_impl is not None for layer in decoder.layers)
        return chosen

    monkeypatch.setattr(backbones, "reader_of", reader_of)
    roles = lora(replace(spec, reward=lora_reward, compile=True))
    assert roles.shared_judge is not None
    judge: Any = roles.shared_judge.members[0].backbone
    assert were_compiled[id(judge._reader)]


@pytest.mark.parametrize(
    ("builder", "reward"),
    [(separate, "lora_reward"), (separate, "frozen_reward"), (lora, "lora_reward"), (trunk, "frozen_reward")],
)
def test_the_critic_starts_as_the_reward_model(
    builder: BuildRoles, reward: str, spec: RoleSpec, rollouts: Rollouts, request: pytest.FixtureRequest
) -> None:
    """The value of a prefix is the normalised score that it would have as a text of its own."""
    folder: Path = request.getfixturevalue(reward)
    values_BT = builder(replace(spec, reward=folder)).critic.values(rollouts)
    by_itself = load(folder, dtype="float32")
    for row, at in ((0, 2), (2, 11), (5, 3)):
        prefix_BT = rollouts.tokens_BT[row : row + 1, :at]
        score = by_itself.score_tokens(prefix_BT, torch.ones_like(prefix_BT, dtype=torch.bool))[0, 0]
        assert_close(values_BT[row, at], score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("builder", "reward"), [(lora, "frozen_reward"), (trunk, "lora_reward")])
def test_a_reward_model_of_other_weights_is_held_by_itself_and_the_note_says_so(
    builder: BuildRoles, reward: str, spec: RoleSpec, request: pytest.FixtureRequest
) -> None:
    roles = builder(replace(spec, reward=request.getfixturevalue(reward)))
    assert roles.shared_judge is None
    assert "is held as a model of its own" in roles.notes[0]


def test_recomputed_activations_give_the_same_step(build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts) -> None:
    plain, frugal = build_roles(spec), build_roles(replace(spec, recompute=True))
    for roles in (plain, frugal):
        update_policy(roles, rollouts)
        update_critic(roles, rollouts)
    assert_close(frugal.policy.logprobs(rollouts), plain.policy.logprobs(rollouts), rtol=1e-5, atol=1e-6)
    assert_close(frugal.critic.values(rollouts), plain.critic.values(rollouts), rtol=1e-5, atol=1e-6)


def test_the_memory_table_counts_what_learns(spec: RoleSpec) -> None:
    by_role = {row.role: row for row in separate(spec).memory}
    weights = sum(weight.numel() for weight in load_causal(spec.base, dtype="float32").parameters())
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


@pytest.mark.parametrize("way", ["separate", "trunk"])
def test_masters_are_the_weights_of_the_files_and_not_their_rounded_copies(
    way: str, spec: RoleSpec, base: Path, frozen_reward: Path, tmp_path: Path
) -> None:
    """Of the policy, of a critic from the policy and of one from the reward model; and what is saved is exact too."""
    file, of_reward = (load_file(folder / "model.safetensors") for folder in (base, frozen_reward))
    narrow = replace(spec, dtype="bfloat16", trunk_layers=1 if way == "trunk" else None)
    builder = {"separate": separate, "trunk": trunk}[way]
    for reward, start in ((None, file), (frozen_reward, of_reward)):
        roles = builder(replace(narrow, reward=reward))
        assert {parameter.dtype for parameter in roles.model.parameters()} == {torch.bfloat16}
        policy = roles.policy.weights()
        assert policy.keys() <= file.keys()
        assert len(policy) > 10
        for name, weight in policy.items():
            assert torch.equal(weight, file[name])
        assert isinstance(roles.critic, Critic)
        for name, weight in roles.critic.train_step.weights().items():  # a top has other names than the whole model
            assert "value_head" in name or any(torch.equal(weight, other) for other in start.values()), name
        saved = save_causal(roles.model, tiny_tokenizer(), tmp_path / "saved", weights=policy, dtype="float32")
        for name, weight in load_file(saved / "model.safetensors").items():
            assert torch.equal(weight, file[name]), name
