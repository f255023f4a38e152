"""Roles of a method without a critic: nothing is built, learnt, saved or counted for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kedge.core.loss import ItemLoss
from kedge.core.records import Rollouts, ValueTargets
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk

BuildRoles = Callable[[RoleSpec], RoleSet]


def test_it_takes_no_memory_and_no_room_in_a_checkpoint(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts
) -> None:
    roles = build_roles(replace(spec, critic=None))
    assert "critic" not in [row.role for row in roles.memory]
    assert not [name for name, _ in roles.model.named_parameters() if "critic" in name]
    assert roles.state()["critic"] == {}
    roles.load(roles.state())
    assert roles.critic.values(rollouts).tolist() == torch.zeros(6, 12).tolist()
    zeros_BT = torch.zeros(6, 12)
    targets = ValueTargets(rollouts=rollouts, old_values_BT=zeros_BT, returns_BT=zeros_BT + 1)
    assert (
        roles.critic.update(targets, lambda values_BT, _: ItemLoss(loss_BT=values_BT, stats_BT={}), per="token") == {}
    )


def test_with_a_critic_the_table_has_its_line_in_place(build_roles: BuildRoles, spec: RoleSpec) -> None:
    roles = [row.role for row in build_roles(spec).memory]
    assert roles[roles.index("actor") + 1 :] == ["critic", "reference"]


def test_a_reward_model_still_shares_weights(spec: RoleSpec, lora_reward: Path, frozen_reward: Path) -> None:
    for builder, reward in ((lora, lora_reward), (trunk, frozen_reward)):
        roles = builder(replace(spec, critic=None, reward=reward))
        assert roles.shared_judge is not None
        assert [row.role for row in roles.memory][1:] == ["actor", "reference", "reward"]
    roles = separate(replace(spec, critic=None, reward=lora_reward))
    assert [row.role for row in roles.memory] == ["actor", "reference"]
