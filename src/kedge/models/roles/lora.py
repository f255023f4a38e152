"""`roles: lora`: one frozen base, which is the reference. Actor, critic and reward model are adapters on it.

Policy and value have separate adapters: in a joint one the two are known to interfere. A reward model shares the base
if it was trained with LoRA on the same weights; any other is loaded as a model of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kedge.core.seeds import seed_for
from kedge.models.forward.backbones import LoraBackbone
from kedge.models.forward.heads import output_head
from kedge.models.forward.lora import activate, required_adapters, with_lora
from kedge.models.loading.hashing import folder_hash, module_hash
from kedge.models.loading.resolve import resolve
from kedge.models.loading.start import load_base
from kedge.models.reward.reward_files import tokenizer_of
from kedge.models.reward.reward_model import RewardRole
from kedge.models.reward.shared import SharedMembers, load_backbone_adapter, load_head, members_on
from kedge.models.roles.actor_critic import (
    Critic,
    NoCritic,
    Policy,
    RoleSet,
    SharedJudge,
    head_from_scores,
    value_head,
)
from kedge.models.roles.build import (
    RoleSpec,
    make_critic,
    make_policy,
    make_reference,
    prepare,
    refuse_moved_reference,
    shard,
    width_of,
)
from kedge.models.roles.memory import RoleMemory, of_role
from kedge.models.training.train_step import TrainStep

POLICY, CRITIC = "policy", "critic"


def lora(spec: RoleSpec) -> RoleSet:
    refuse_moved_reference(spec, "lora")
    unread = spec.world.mesh is not None
    base = load_base(spec.base, dtype=spec.dtype, device=spec.device, bits=spec.lora.base_bits, unread=unread)
    members = _shared_members(spec)
    model = with_lora(base, spec.lora, name=POLICY, seed=seed_for(spec.seed, POLICY))
    critic_head = _add_critic(spec, model, members) if spec.critic else None
    _add_members(model, members)
    activate(model, POLICY)  # the one that samples
    prepare(spec, model, learns=False, recomputes=True)
    _mark_trainable(model, POLICY, *([CRITIC] if critic_head else []))
    shard(spec, model)
    judge = _judge(spec, model, members)  # from here on: who reads the layers looks whether they are prepared
    policy = make_policy(spec, LoraBackbone(model, POLICY), output_head(base))
    critic = (
        make_critic(spec, spec.critic, LoraBackbone(model, CRITIC), critic_head)
        if spec.critic and critic_head
        else NoCritic()
    )
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(spec, LoraBackbone(model, None), output_head(base)),
        shared_judge=judge,
        memory=_memory(model, policy, critic, judge),
        notes=[] if judge or not spec.reward else [_NOTE.format(spec.reward)],
        reference_hash=module_hash(model),
    )


_NOTE = (
    "the reward model in {} was not trained with LoRA on the weights of this policy, so it is held as a model of its "
    "own; with `lora:` in the reward stage and the same `from` it would share the base"
)


def _shared_members(spec: RoleSpec) -> SharedMembers | None:
    """The adapters of the reward model if they were trained on the weights of this base."""
    place = resolve(spec.base)
    return members_on(spec.reward, folder_hash(place)) if spec.reward and isinstance(place, Path) else None


def _add_critic(spec: RoleSpec, model: PreTrainedModel, members: SharedMembers | None) -> nn.Linear:
    """Add the critic's adapter to the model; its head. Both from the reward model if it shares the base, else new."""
    if members is None or not spec.critic_from_reward:
        with_lora(model, spec.lora, name=CRITIC, seed=seed_for(spec.seed, CRITIC))
        return value_head(width_of(model), torch.device(spec.device))
    folder, facts = members.folders[0], members.facts[0]
    load_backbone_adapter(model, folder, name=CRITIC)
    return head_from_scores(load_head(folder).to(spec.device), facts, spec.objective)


def _mark_trainable(model: PreTrainedModel, *names: str) -> None:
    """The factors of these adapters learn."""
    for name in names:
        for _, parameter in required_adapters(model).parameters(name):
            parameter.requires_grad_(True)


def _add_members(model: PreTrainedModel, members: SharedMembers | None) -> None:
    """Add the adapters of the reward model to the model."""
    for index, folder in enumerate(members.folders if members else ()):
        load_backbone_adapter(model, folder, name=_reward_name(index))


def _judge(spec: RoleSpec, model: PreTrainedModel, members: SharedMembers | None) -> SharedJudge | None:
    if members is None:
        return None
    assert spec.reward is not None
    tokenizer = tokenizer_of(spec.reward)
    roles = [
        RewardRole(
            backbone=LoraBackbone(model, _reward_name(index)),
            head_KD=load_head(folder).to(spec.device),
            tokenizer=tokenizer,
            facts=facts,
        )
        for index, (folder, facts) in enumerate(zip(members.folders, members.facts, strict=True))
    ]
    return SharedJudge(members=tuple(roles), combine=members.combine)


def _reward_name(index: int) -> str:
    return f"reward-{index}"


def _memory(
    model: PreTrainedModel, policy: Policy, critic: Critic | NoCritic, judge: SharedJudge | None
) -> list[RoleMemory]:
    base = [parameter for name, parameter in model.named_parameters() if ".lora_" not in name]
    rewards = [parameter for name, parameter in model.named_parameters() if ".lora_" in name and ".reward-" in name]

    def trained(role: str, train_step: TrainStep) -> RoleMemory:
        own = [parameter for _, parameter in train_step.named]
        return of_role(role, shared=base, own=own, train_step=train_step)

    return [
        of_role("base", own=base),
        trained("actor", policy.train_step),
        *([trained("critic", critic.train_step)] if isinstance(critic, Critic) else []),
        of_role("reference", shared=base),
        *([of_role("reward", shared=base, own=rewards)] if judge else []),
    ]
