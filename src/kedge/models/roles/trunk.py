"""`roles: trunk`: the lower layers are frozen and shared, computed once a sequence for all roles; each owns a top.

A reward model shares the trunk if its lower layers are the policy's (`frozen_layers` in the reward stage); any other is
a model of its own beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.models.forward import heads
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.reward.ensemble import Ensemble, load_reward
from kedge.models.reward.reward_model import RewardModel, head_of
from kedge.models.roles.backbones import TrunkBackbone
from kedge.models.roles.build import (
    RoleSet,
    RoleSpec,
    SharedJudge,
    critic_head,
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
from kedge.models.roles.reward import RewardRole
from kedge.models.roles.shared_trunk import SharedTrunk, own_top, same_trunk, top_of
from kedge.models.settings import Combine, MeanOfMembers

_NOTE = (
    "the reward model in {} has other lower layers than this policy, so it is held as a model of its own; with "
    "`frozen_layers: {}` in the reward stage and the same `from` it would share the trunk"
)


def trunk(wanted: RoleSpec) -> RoleSet:
    model = load_causal(wanted.base, dtype=wanted.dtype, device=wanted.device)
    identity = module_hash(model)
    prepare(wanted, model, learns=True, recomputes=True)
    layers = wanted.trunk_layers or max(1, model.config.get_text_config().num_hidden_layers // 2)
    cut = SharedTrunk(model, layers)
    members, combine = _members(wanted, model, layers)
    still, still_head = own_top(model, layers), _own_head(model)
    prepare(wanted, still, learns=False)
    policy = make_policy(wanted, TrunkBackbone(cut, top_of(model, layers), names=model), output_head(model))
    shared = [one for one in model.parameters() if not one.requires_grad]
    critic, seen = _critic(wanted, cut, members, model, shared)
    tops = [top_of(plain(member), layers) for member in members]
    for top in tops:
        prepare(wanted, top, learns=False)
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(wanted, TrunkBackbone(cut, still, names=still), still_head, policy),
        shared_judge=_judge(cut, members, tops, combine) if members else None,
        memory=[
            of_role("trunk", own=shared),
            of_role("actor", shared=shared, own=_learning(model), stepper=policy.stepper),
            *seen,
            of_role("reference", shared=shared, own=parameters_of(still)),
            *([of_role("reward", shared=shared, own=parameters_of(*tops))] if tops else []),
        ],
        notes=[] if members or not wanted.reward else [_NOTE.format(wanted.reward, layers)],
        reference_hash=identity,
        forget=cut.forget,
    )


def _critic(
    wanted: RoleSpec, cut: SharedTrunk, members: Sequence[RewardModel], model: PreTrainedModel, shared: Sequence[Tensor]
) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A top of its own, from the reward's where it shares the trunk; with its line of the memory table."""
    if wanted.critic is None:
        return NoCritic(), []
    first = members[0] if members and wanted.critic_from_reward else None
    seer = own_top(plain(first) if first else model, cut.layers)
    prepare(wanted, seer, learns=True, recomputes=True)
    head = critic_head(wanted, first, width_of(model))
    critic = make_critic(wanted, wanted.critic, TrunkBackbone(cut, seer, names=seer), head)
    return critic, [of_role("critic", shared=shared, own=parameters_of(seer), stepper=critic.stepper)]


def _members(wanted: RoleSpec, model: PreTrainedModel, layers: int) -> tuple[tuple[RewardModel, ...], Combine]:
    """The members of the reward model if all of them share the trunk, else none."""
    if wanted.reward is None:
        return (), MeanOfMembers()
    found = load_reward(wanted.reward, dtype=wanted.dtype, device=wanted.device)
    members, combine = (found.members, found.combine) if isinstance(found, Ensemble) else ((found,), MeanOfMembers())
    fits = all(same_trunk(model, plain(member), layers) for member in members)
    return (members if fits else ()), combine


def _judge(
    cut: SharedTrunk, members: Sequence[RewardModel], tops: Sequence[PreTrainedModel], combine: Combine
) -> SharedJudge:
    judges = tuple(
        RewardRole(
            body=TrunkBackbone(cut, top, names=top),
            head_KD=head_of(plain(member)).weight.detach().clone(),
            tokenizer=member.tokenizer,
            facts=member.facts,
        )
        for member, top in zip(members, tops, strict=True)
    )
    return SharedJudge(members=judges, combine=combine)


def _own_head(model: PreTrainedModel) -> Callable[[], Tensor]:
    """The output matrix as it is now: one that is tied to the frozen embedding stays so by itself."""
    head_VD = heads.lm_head(model)
    still_VD = head_VD.detach().clone() if head_VD.requires_grad else head_VD
    return lambda: still_VD


def _learning(model: PreTrainedModel) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]
