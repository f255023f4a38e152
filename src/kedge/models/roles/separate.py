"""`roles: separate`: four models of their own. The baseline that the other ways are tested against."""

from __future__ import annotations

from kedge.models.identity import module_hash
from kedge.models.load import load_causal
from kedge.models.roles.bodies import Whole
from kedge.models.roles.critic import Critic, NoCritic
from kedge.models.roles.hold import (
    Held,
    Wanted,
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
from kedge.models.roles.memory import RoleMemory, of_role, parameters_of


def separate(wanted: Wanted) -> Held:
    model, still = (load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device) for _ in range(2))
    prepare(wanted, model, learns=True, recomputes=True)
    prepare(wanted, still, learns=False)
    policy = make_policy(wanted, Whole(model), output_head(model))
    critic, seen = _critic(wanted, width_of(model))
    return Held(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(wanted, Whole(still), output_head(still), policy),
        shared_judge=None,
        memory=[
            of_role("actor", own=parameters_of(model), stepper=policy.stepper),
            *seen,
            of_role("reference", own=parameters_of(still)),
        ],
        notes=[],
        reference_hash=module_hash(still),
    )


def _critic(wanted: Wanted, width: int) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A model of its own, from the reward's where there is one; with its line of the memory table."""
    if wanted.critic is None:
        return NoCritic(), []
    member = load_members(wanted)[0] if wanted.reward and wanted.critic_from_reward else None
    seer = plain(member) if member else load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device)
    head = critic_head(wanted, member, width)
    prepare(wanted, seer, learns=False, recomputes=True)
    seer.get_decoder().requires_grad_(True)
    critic = make_critic(wanted, wanted.critic, Whole(seer), head)
    return critic, [of_role("critic", own=parameters_of(seer, head), stepper=critic.stepper)]
