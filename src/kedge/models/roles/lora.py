"""`roles: lora`: one frozen base. The actor, the critic and the reward are adapters on it, the reference is it.

The adapters of policy and value are separate: a joint one is known to interfere. A reward model shares the base if it
was trained with LoRA on the same weights; any other is a model of its own beside.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from kedge.core.seeds import seed_for
from kedge.models.forward.lora import base_of, with_lora
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.loading.resolve import resolve
from kedge.models.reward.base_link import weights_hash
from kedge.models.reward.reward_files import tokenizer_of
from kedge.models.reward.shared import SharedMembers, load_body_adapter, load_head, members_on
from kedge.models.roles.backbones import LoraBackbone
from kedge.models.roles.build import (
    RoleSet,
    RoleSpec,
    SharedJudge,
    make_critic,
    make_policy,
    make_reference,
    output_head,
    prepare,
    width_of,
)
from kedge.models.roles.critic import Critic, NoCritic, head_from_scores, value_head
from kedge.models.roles.memory import RoleMemory, of_role
from kedge.models.roles.policy import Policy
from kedge.models.roles.reward import RewardRole
from kedge.models.training.train_step import TrainStep

POLICY, CRITIC = "policy", "critic"


def lora(wanted: RoleSpec) -> RoleSet:
    base = load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device, bits=wanted.lora.base_bits)
    members = _shared_members(wanted)
    model = with_lora(base, wanted.lora, name=POLICY, seed=seed_for(wanted.seed, POLICY))
    value = _add_critic(wanted, model, members) if wanted.critic else None
    judge = _judge(wanted, model, members)
    model.set_adapter(POLICY)  # the one that samples
    prepare(wanted, model, learns=False, recomputes=True)
    policy = make_policy(wanted, _learning(model, POLICY), output_head(base))
    critic = (
        make_critic(wanted, wanted.critic, _learning(model, CRITIC), value) if wanted.critic and value else NoCritic()
    )
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(wanted, LoraBackbone(model, None), output_head(base), policy),
        shared_judge=judge,
        memory=_memory(model, policy, critic, judge),
        notes=[] if judge or not wanted.reward else [_NOTE.format(wanted.reward)],
        reference_hash=module_hash(base_of(model), without=".lora_"),
    )


_NOTE = (
    "the reward model in {} was not trained with LoRA on the weights of this policy, so it is held as a model of its "
    "own; with `lora:` in the reward stage and the same `from` it would share the base"
)


def _shared_members(wanted: RoleSpec) -> SharedMembers | None:
    place = resolve(wanted.base)
    return members_on(wanted.reward, weights_hash(place)) if wanted.reward and isinstance(place, Path) else None


def _add_critic(wanted: RoleSpec, model: PeftModel, members: SharedMembers | None) -> nn.Linear:
    """The critic's adapter, put on the model, and its head: the reward's where it shares the base, else new ones."""
    if members is None or not wanted.critic_from_reward:
        with_lora(model, wanted.lora, name=CRITIC, seed=seed_for(wanted.seed, CRITIC))
        return value_head(width_of(model), torch.device(wanted.device))
    folder, facts = members.folders[0], members.facts[0]
    load_body_adapter(model, folder, name=CRITIC)
    return head_from_scores(load_head(folder).to(wanted.device), facts, wanted.objective)


def _learning(model: PeftModel, adapter: str) -> LoraBackbone:
    """An adapter that learns."""
    body = LoraBackbone(model, adapter)
    for _, one in body.trainable():
        one.requires_grad_(True)
    return body


def _judge(wanted: RoleSpec, model: PeftModel, members: SharedMembers | None) -> SharedJudge | None:
    if members is None:
        return None
    assert wanted.reward is not None
    tokenizer = tokenizer_of(wanted.reward)
    judges: list[RewardRole] = []
    for index, (folder, facts) in enumerate(zip(members.folders, members.facts, strict=True)):
        name = f"reward-{index}"
        load_body_adapter(model, folder, name=name)
        head_KD = load_head(folder).to(wanted.device)
        judges.append(RewardRole(body=LoraBackbone(model, name), head_KD=head_KD, tokenizer=tokenizer, facts=facts))
    return SharedJudge(members=tuple(judges), combine=members.combine)


def _memory(model: PeftModel, policy: Policy, critic: Critic | NoCritic, judge: SharedJudge | None) -> list[RoleMemory]:
    base = [one for name, one in model.named_parameters() if ".lora_" not in name]
    rewards = [one for name, one in model.named_parameters() if ".reward-" in name]

    def learning(role: str, stepper: TrainStep) -> RoleMemory:
        return of_role(role, shared=base, own=[one for _, one in stepper.named], stepper=stepper)

    return [
        of_role("base", own=base),
        learning("actor", policy.stepper),
        *([learning("critic", critic.stepper)] if isinstance(critic, Critic) else []),
        of_role("reference", shared=base),
        *([of_role("reward", shared=base, own=rewards)] if judge else []),
    ]
