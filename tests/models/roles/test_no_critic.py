"""Roles of a method without a critic: nothing is built, learnt, saved or counted for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kedge.core.loss import ItemLoss
from kedge.core.records import Rollouts, ValueTargets
from kedge.models.roles.build import RoleSet, RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk

BuildRoles = Callable[[RoleSpec], RoleSet]


def test_the_other_roles_are_those_that_a_critic_stands_beside(
    build_roles: BuildRoles, spec: RoleSpec, rollouts: Rollouts
) -> None:
    with_critic, without = build_roles(spec), build_roles(replace(spec, critic=None))
    assert torch.equal(without.policy.logprobs(rollouts), with_critic.policy.logprobs(rollouts))
    assert torch.equal(without.reference.logprobs(rollouts), with_critic.reference.logprobs(rollouts))
    assert without.reference_hash == with_critic.reference_hash
    assert without.policy.train_step.weights().keys() == with_critic.policy.train_step.weights().keys()


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


def test_a_reward_that_shares_weights_still_does(spec: RoleSpec, lora_reward: Path, frozen_reward: Path) -> None:
    for build_roles, reward in ((lora, lora_reward), (trunk, frozen_reward)):
        roles = build_roles(replace(spec, critic=None, reward=reward))
        assert roles.shared_judge is not None
        assert [row.role for row in roles.memory][1:] == ["actor", "reference", "reward"]
    roles = separate(replace(spec, critic=None, reward=lora_reward))
    assert [row.role for row in roles.memory] == ["actor", "reference"]
