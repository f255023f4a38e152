"""Roles on tiny models: a policy, reward models that share its weights, and a batch of rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kedge.core.records import Rollouts
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import lora_members
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import Normaliser, RewardModel
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.models.settings import LoraSettings
from kedge.testing.contracts.roles import example_spec

LAYERS = 3
BUILDERS = {"separate": separate, "lora": lora, "trunk": trunk}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("roles") / "policy", seed=2, hidden=32, layers=LAYERS)


@pytest.fixture(scope="session")
def lora_reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, as it were, with LoRA on the policy's weights."""
    built = build(base, objectives=["reward"], seed=5, dtype="float32")
    (member,) = lora_members(built, LoraSettings(rank=4), count=1, seed=9)
    return _saved(member, tmp_path_factory.mktemp("lora-reward") / "model", moving=".lora_B")


@pytest.fixture(scope="session")
def frozen_reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained, as it were, with its lowest layer frozen."""
    built = build(base, objectives=["reward"], seed=6, dtype="float32")
    return _saved(built, tmp_path_factory.mktemp("frozen-reward") / "model", moving=".layers.2.")


def _saved(member: RewardModel, folder: Path, *, moving: str) -> Path:
    rng = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in member.model.named_parameters():
            if moving in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
    facts = replace(member.facts, normaliser=Normaliser(mean=(0.25,), std=(1.7,)))
    save(replace(member, facts=facts), folder)
    return folder


@pytest.fixture
def spec(base: Path) -> RoleSpec:
    return replace(example_spec(base), critic_from_reward=True)


@pytest.fixture(params=list(BUILDERS))
def build_roles(request: pytest.FixtureRequest) -> Callable[[RoleSpec], RoleSet]:
    return BUILDERS[request.param]


@pytest.fixture(scope="session")
def rollouts() -> Rollouts:
    """Six rows of unlike lengths; the response starts at the third token."""
    rng = torch.Generator().manual_seed(4)
    length_B = torch.tensor([9, 5, 12, 7, 12, 4])
    index_T = torch.arange(12)
    attention_BT = index_T < length_B[:, None]
    return Rollouts(
        tokens_BT=torch.randint(32, 120, (6, 12), generator=rng).masked_fill(~attention_BT, 256),
        attention_mask_BT=attention_BT,
        response_mask_BT=attention_BT & (index_T >= 2),
        behaviour_logp_BT=torch.zeros(6, 12),
        group_B=torch.arange(6),
        finished_B=torch.tensor([True, False, True, True, False, True]),
        version=0,
    )
