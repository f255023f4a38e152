"""`roles: trunk`: frozen lower layers, computed once a sequence for all roles; each role has its own upper layers.

A reward model shares the trunk if its lower layers are the policy's (`frozen_layers` in the reward stage); any other is
loaded as a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError
from kedge.models.forward import heads
from kedge.models.forward.backbones import SharedTrunk, TrunkBackbone, own_top, same_trunk, top_of, trunk_modules
from kedge.models.forward.heads import output_head
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.reward.ensemble import Ensemble, load_reward
from kedge.models.reward.reward_model import RewardModel, RewardRole, head_of
from kedge.models.roles.actor_critic import Critic, NoCritic, RoleSet, SharedJudge
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
    refuse_moved_reference,
    width_of,
)
from kedge.models.roles.memory import RoleMemory, of_role, parameters_of
from kedge.models.settings import Combine, MeanOfMembers

_NOTE = (
    "the reward model in {} has other lower layers than this policy, so it is held as a model of its own; with "
    "`frozen_layers: {}` in the reward stage and the same `from` it would share the trunk"
)


def trunk(spec: RoleSpec) -> RoleSet:
    refuse_moved_reference(spec, "trunk")
    if spec.world.mesh is not None:
        raise ConfigError(
            "roles: trunk keeps hidden states of rows in each process, which placement.weights: shard does not allow: "
            "use roles: lora or separate, or weights: replicate"
        )
    model = load_causal(spec.base, dtype="float32", device=spec.device)
    prepare(spec, model, learns=True, recomputes=True)
    layers = spec.trunk_layers or max(1, model.config.get_text_config().num_hidden_layers // 2)
    for module in trunk_modules(model, layers):
        module.requires_grad_(False)
    # As the policy is in its files, and before its weights are rounded: for a critic without a reward model.
    value_top = own_top(model, layers) if spec.critic else None
    masters = narrowed(spec, model)
    reference_hash = module_hash(model)
    shared_trunk = SharedTrunk(model, layers)
    members, combine = _shared_members(spec, model, layers)
    reference_top, reference_head = own_top(model, layers), _own_head(model)
    prepare(spec, reference_top, learns=False)
    policy_backbone = TrunkBackbone(shared_trunk, top_of(model, layers), owner=model)
    policy = make_policy(spec, policy_backbone, output_head(model), masters)
    shared = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    actor = [parameter for parameter in model.parameters() if parameter.requires_grad]
    critic, critic_memory = _critic(spec, shared_trunk, value_top, shared, from_reward=bool(members))
    reward_tops = [top_of(plain(member), layers) for member in members]
    for top in reward_tops:
        prepare(spec, top, learns=False)
    reference_backbone = TrunkBackbone(shared_trunk, reference_top, owner=reference_top)
    return RoleSet(
        model=model,
        policy=policy,
        critic=critic,
        reference=make_reference(spec, reference_backbone, reference_head),
        shared_judge=_judge(shared_trunk, members, reward_tops, combine) if members else None,
        memory=[
            of_role("trunk", own=shared),
            of_role("actor", shared=shared, own=actor, train_step=policy.train_step),
            *critic_memory,
            of_role("reference", shared=shared, own=parameters_of(reference_top)),
            *([of_role("reward", shared=shared, own=parameters_of(*reward_tops))] if reward_tops else []),
        ],
        notes=[] if members or not spec.reward else [_NOTE.format(spec.reward, layers)],
        reference_hash=reference_hash,
        forget=shared_trunk.forget,
    )


def _critic(
    spec: RoleSpec,
    shared_trunk: SharedTrunk,
    policy_top: PreTrainedModel | None,
    shared: Sequence[Tensor],
    *,
    from_reward: bool,
) -> tuple[Critic | NoCritic, list[RoleMemory]]:
    """A top of its own, from the reward model if it shares the trunk, else the policy's; with its row of the table."""
    if spec.critic is None or policy_top is None:
        return NoCritic(), []
    member = first_member(spec) if from_reward and spec.critic_from_reward else None
    value_top = own_top(plain(member), shared_trunk.layers) if member else policy_top
    head = critic_head(spec, member, width_of(value_top))
    prepare(spec, value_top, learns=True, recomputes=True)
    masters = narrowed(spec, value_top)
    critic = make_critic(spec, spec.critic, TrunkBackbone(shared_trunk, value_top, owner=value_top), head, masters)
    return critic, [of_role("critic", shared=shared, own=parameters_of(value_top), train_step=critic.train_step)]


def _shared_members(spec: RoleSpec, model: PreTrainedModel, layers: int) -> tuple[tuple[RewardModel, ...], Combine]:
    """The members of the reward model if all of them share the trunk, else none."""
    if spec.reward is None:
        return (), MeanOfMembers()
    loaded = load_reward(spec.reward, dtype=spec.dtype, device=spec.device)
    members, combine = (
        (loaded.members, loaded.combine) if isinstance(loaded, Ensemble) else ((loaded,), MeanOfMembers())
    )
    is_shared = all(same_trunk(model, plain(member), layers) for member in members)
    return (members if is_shared else ()), combine


def _judge(
    shared_trunk: SharedTrunk, members: Sequence[RewardModel], tops: Sequence[PreTrainedModel], combine: Combine
) -> SharedJudge:
    roles = tuple(
        RewardRole(
            backbone=TrunkBackbone(shared_trunk, top, owner=top),
            head_KD=head_of(plain(member)).weight.detach().clone(),
            tokenizer=member.tokenizer,
            facts=member.facts,
        )
        for member, top in zip(members, tops, strict=True)
    )
    return SharedJudge(members=roles, combine=combine)


def _own_head(model: PreTrainedModel) -> Callable[[], Tensor]:
    """The output matrix as it is now: a copy, unless it is tied to the frozen embedding and never changes."""
    head_VD = heads.lm_head(model)
    frozen_VD = head_VD.detach().clone() if head_VD.requires_grad else head_VD
    return lambda: frozen_VD
