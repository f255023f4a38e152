"""`roles: separate`: a model for each role. The baseline that the other ways are tested against."""

from __future__ import annotations

from transformers import PreTrainedModel

from kedge.models.forward.backbones import FullBackbone
from kedge.models.forward.heads import output_head
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.roles.actor_critic import Critic, NoCritic, Policy, Reference, RoleSet
from kedge.models.roles.build import (
    RoleSpec,
    critic_head,
    first_member,
    make_critic,
    make_policy,
    make_reference,
    narrowed,
    plain,
    prepare,
    shard,
    width_of,
)
from kedge.models.roles.memory import RoleMemory, of_role, parameters_of


def separate(spec: RoleSpec) -> RoleSet:
    model, policy = separate_policy(spec)
    reference, reference_memory, reference_hash = separate_reference(spec)
    critic, critic_memory = separate_critic(spec)
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=reference,
        shared_judge=None,
        memory=[policy_memory(model, policy), *critic_memory, reference_memory],
        notes=[],
        reference_hash=reference_hash,
    )


def separate_policy(spec: RoleSpec) -> tuple[PreTrainedModel, Policy]:
    model = load_causal(spec.base, dtype="float32", device=spec.device, unread=spec.world.mesh is not None)
    prepare(spec, model, learns=True, recomputes=True)
    masters = narrowed(spec, model)
    return model, make_policy(spec, FullBackbone(model), output_head(model), masters)


def policy_memory(model: PreTrainedModel, policy: Policy) -> RoleMemory:
    return of_role("actor", own=parameters_of(model), train_step=policy.train_step)


def separate_reference(spec: RoleSpec) -> tuple[Reference, RoleMemory, str]:
    """The reference, its row of the memory table, and the hash of its weights."""
    unread = spec.world.mesh is not None
    model = load_causal(spec.base, dtype=spec.dtype, device=spec.device, bits=spec.frozen_bits, unread=unread)
    prepare(spec, model, learns=False)
    shard(spec, model)
    backbone, head, reference_hash = FullBackbone(model), output_head(model), module_hash(model)
    moved = MovedWeights([model]) if "reference" in spec.offload else None
    memory = of_role("reference", own=parameters_of(model), is_moved=moved is not None)
    return make_reference(spec, backbone, head, moved), memory, reference_hash


def separate_critic(spec: RoleSpec) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A model of its own, from the reward model where there is one; with its row of the memory table."""
    if spec.critic is None:
        return NoCritic(), []
    member = first_member(spec) if spec.reward and spec.critic_from_reward else None
    value_model = (
        plain(member)
        if member
        else load_causal(spec.base, dtype="float32", device=spec.device, unread=spec.world.mesh is not None)
    )
    head = critic_head(spec, member, width_of(value_model))
    prepare(spec, value_model, learns=False, recomputes=True)
    value_model.get_decoder().requires_grad_(True)
    masters = narrowed(spec, value_model)
    critic = make_critic(spec, spec.critic, FullBackbone(value_model), head, masters)
    return critic, [of_role("critic", own=parameters_of(value_model, head), train_step=critic.train_step)]
