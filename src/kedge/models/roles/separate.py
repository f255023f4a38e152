"""`roles: separate`: a model for each role. The baseline that the other ways are tested against."""

from __future__ import annotations

from kedge.models.forward.backbones import FullBackbone
from kedge.models.forward.heads import output_head
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.roles.actor_critic import Critic, NoCritic, RoleSet
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
    model = load_causal(spec.base, dtype="float32", device=spec.device)
    prepare(spec, model, learns=True, recomputes=True)
    masters = narrowed(spec, model)
    policy = make_policy(spec, FullBackbone(model), output_head(model), masters)
    reference_model = load_causal(spec.base, dtype=spec.dtype, device=spec.device)
    prepare(spec, reference_model, learns=False)
    reference_hash = module_hash(reference_model)
    shard(spec, reference_model)
    critic, critic_memory = _critic(spec, width_of(model))
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(spec, FullBackbone(reference_model), output_head(reference_model)),
        shared_judge=None,
        memory=[
            of_role("actor", own=parameters_of(model), train_step=policy.train_step),
            *critic_memory,
            of_role("reference", own=parameters_of(reference_model)),
        ],
        notes=[],
        reference_hash=reference_hash,
    )


def _critic(spec: RoleSpec, width: int) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A model of its own, from the reward model where there is one; with its row of the memory table."""
    if spec.critic is None:
        return NoCritic(), []
    member = first_member(spec) if spec.reward and spec.critic_from_reward else None
    value_model = plain(member) if member else load_causal(spec.base, dtype="float32", device=spec.device)
    head = critic_head(spec, member, width)
    prepare(spec, value_model, learns=False, recomputes=True)
    value_model.get_decoder().requires_grad_(True)
    masters = narrowed(spec, value_model)
    critic = make_critic(spec, spec.critic, FullBackbone(value_model), head, masters)
    return critic, [of_role("critic", own=parameters_of(value_model, head), train_step=critic.train_step)]
