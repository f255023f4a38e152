"""`roles: separate`: four models of their own. The baseline that the other ways are tested against."""

from __future__ import annotations

from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.roles.backbones import FullBackbone
from kedge.models.roles.build import (
    RoleSet,
    RoleSpec,
    critic_head,
    load_members,
    make_critic,
    make_policy,
    make_reference,
    output_head,
    plain,
    prepare,
    width_of,
)
from kedge.models.roles.critic import Critic, NoCritic
from kedge.models.roles.memory import RoleMemory, of_role, parameters_of


def separate(wanted: RoleSpec) -> RoleSet:
    model, still = (load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device) for _ in range(2))
    prepare(wanted, model, learns=True, recomputes=True)
    prepare(wanted, still, learns=False)
    policy = make_policy(wanted, FullBackbone(model), output_head(model))
    critic, seen = _critic(wanted, width_of(model))
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(wanted, FullBackbone(still), output_head(still), policy),
        shared_judge=None,
        memory=[
            of_role("actor", own=parameters_of(model), stepper=policy.stepper),
            *seen,
            of_role("reference", own=parameters_of(still)),
        ],
        notes=[],
        reference_hash=module_hash(still),
    )


def _critic(wanted: RoleSpec, width: int) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A model of its own, from the reward's where there is one; with its line of the memory table."""
    if wanted.critic is None:
        return NoCritic(), []
    member = load_members(wanted)[0] if wanted.reward and wanted.critic_from_reward else None
    seer = plain(member) if member else load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device)
    head = critic_head(wanted, member, width)
    prepare(wanted, seer, learns=False, recomputes=True)
    seer.get_decoder().requires_grad_(True)
    critic = make_critic(wanted, wanted.critic, FullBackbone(seer), head)
    return critic, [of_role("critic", own=parameters_of(seer, head), stepper=critic.stepper)]
