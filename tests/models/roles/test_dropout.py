"""Dropout is off in every role: in each way to build them, whether or not a reward model shares weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.core.records import Rollouts
from kedge.models.loading.load import load_causal
from kedge.models.reward.ensemble import lora_members
from kedge.models.reward.reward_files import build, load, save
from kedge.models.reward.reward_model import reward_role
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.settings import LoraSettings
from kedge.testing.contracts.roles import dropout_model, example_spec, update_critic

BuildRoles = Callable[[RoleSpec], RoleSet]
Compute = Callable[[], Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dropout_model(tmp_path_factory.mktemp("policy") / "model", 0.5)


@pytest.fixture(scope="module")
def full_reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its lower layers are the policy's."""
    folder = tmp_path_factory.mktemp("full") / "model"
    save(build(base, seed=5, dtype="float32"), folder)
    return folder


@pytest.fixture(scope="module")
def lora_reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters with dropout of their own on the policy's weights."""
    lora = LoraSettings(rank=4, dropout=0.5)
    (member,) = lora_members(build(base, seed=5, dtype="float32"), lora, count=1, seed=9)
    with torch.no_grad():
        for name, parameter in member.model.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(0.05)  # with a B of zero, dropout before A changes nothing
    folder = tmp_path_factory.mktemp("lora") / "model"
    save(member, folder)
    return folder


@pytest.mark.parametrize("reward", [None, "full_reward", "lora_reward"])
def test_dropout_is_off_in_every_role(
    build_roles: BuildRoles, reward: str | None, base: Path, rollouts: Rollouts, request: pytest.FixtureRequest
) -> None:
    spec = replace(
        example_spec(base),
        reward=request.getfixturevalue(reward) if reward else None,
        critic_from_reward=True,
        lora=LoraSettings(rank=4, alpha=8, dropout=0.5),
    )
    roles = build_roles(spec)
    for adapters in (parameter for name, parameter in roles.model.named_parameters() if ".lora_B" in name):
        nn.init.constant_(adapters, 0.05)
    update_critic(roles, rollouts)  # its head starts at zero
    members = roles.shared_judge.members if roles.shared_judge else ()
    computations: dict[str, tuple[Any, Compute]] = {
        "policy": (roles.policy, lambda: roles.policy.logprobs(rollouts)),
        "reference": (roles.reference, lambda: roles.reference.logprobs(rollouts)),
        "critic": (roles.critic, lambda: roles.critic.values(rollouts)),
    }
    for index, member in enumerate(members):
        score = lambda member=member: member.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT)  # noqa: E731
        computations[f"reward-{index}"] = (member, score)
    for name, (role, compute) in computations.items():
        assert_repeatable(name, decoders_of(role), compute, roles.forget)


def test_dropout_is_off_in_a_reward_model_of_its_own(full_reward: Path, lora_reward: Path, rollouts: Rollouts) -> None:
    for folder in (full_reward, lora_reward):
        role = reward_role(load(folder, dtype="float32"), compiled=False)
        assert_repeatable(
            folder.parent.name,
            decoders_of(role),
            lambda role=role: role.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT),
            lambda: None,
        )


def test_the_model_of_these_tests_has_dropout(base: Path, rollouts: Rollouts) -> None:
    model = load_causal(base, dtype="float32").train()
    first, second = (model(rollouts.tokens_BT).logits for _ in range(2))
    assert not torch.allclose(first, second)


def decoders_of(role: Any) -> list[nn.Module]:
    """All that a role computes hidden states with, the trunk below it included."""
    model = getattr(role, "_model", role)
    backbone = getattr(model, "_backbone", None) or model.backbone
    trunk = getattr(backbone, "_shared_trunk", None)
    return [part._reader.decoder for part in (backbone, trunk) if part is not None]


def assert_repeatable(name: str, decoders: list[nn.Module], compute: Compute, forget: Callable[[], None]) -> None:
    """In training mode, where dropout would act, the numbers are those of evaluation mode."""
    expected = compute()
    for decoder in decoders:
        decoder.train()
    forget()
    assert torch.equal(compute(), expected), f"{name}: dropout is on"
    for decoder in decoders:
        decoder.eval()
    assert expected.any(), f"{name}: nothing was computed"
