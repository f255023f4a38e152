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

Hold = Callable[[RoleSpec], RoleSet]


def test_the_other_roles_are_those_that_a_critic_stands_beside(
    hold: Hold, wanted: RoleSpec, rollouts: Rollouts
) -> None:
    with_critic, without = hold(wanted), hold(replace(wanted, critic=None))
    assert torch.equal(without.policy.logprobs(rollouts), with_critic.policy.logprobs(rollouts))
    assert torch.equal(without.reference.logprobs(rollouts), with_critic.reference.logprobs(rollouts))
    assert without.reference_hash == with_critic.reference_hash
    assert without.policy.stepper.weights().keys() == with_critic.policy.stepper.weights().keys()


def test_it_takes_no_memory_and_no_room_in_a_checkpoint(hold: Hold, wanted: RoleSpec, rollouts: Rollouts) -> None:
    held = hold(replace(wanted, critic=None))
    assert "critic" not in [row.role for row in held.memory]
    assert not [name for name, _ in held.model.named_parameters() if "critic" in name]
    assert held.state()["critic"] == {}
    held.load(held.state())
    assert held.critic.values(rollouts).tolist() == torch.zeros(6, 12).tolist()
    zeros_BT = torch.zeros(6, 12)
    targets = ValueTargets(rollouts=rollouts, old_values_BT=zeros_BT, returns_BT=zeros_BT + 1)
    assert held.critic.update(targets, lambda values_BT, _: ItemLoss(loss_BT=values_BT, stats_BT={}), per="token") == {}


def test_with_a_critic_the_table_has_its_line_in_place(hold: Hold, wanted: RoleSpec) -> None:
    roles = [row.role for row in hold(wanted).memory]
    assert roles[roles.index("actor") + 1 :] == ["critic", "reference"]


def test_a_reward_that_shares_weights_still_does(wanted: RoleSpec, lora_reward: Path, frozen_reward: Path) -> None:
    for hold, reward in ((lora, lora_reward), (trunk, frozen_reward)):
        held = hold(replace(wanted, critic=None, reward=reward))
        assert held.shared_judge is not None
        assert [row.role for row in held.memory][1:] == ["actor", "reference", "reward"]
    held = separate(replace(wanted, critic=None, reward=lora_reward))
    assert [row.role for row in held.memory] == ["actor", "reference"]
