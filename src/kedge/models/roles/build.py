"""What the roles of PPO are built from (`RoleSpec`), the result (`RoleSet`), and what all ways to build them share.

`separate` loads four models, `lora` puts adapters on one base, `trunk` puts upper layers on one trunk. What differs is
where hidden states come from; the roles themselves, their optimisers and their states are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from kedge.core.errors import ConfigError
from kedge.core.optimiser import OptimiserSettings
from kedge.core.world import ALONE, World
from kedge.models.forward.backbones import Backbone
from kedge.models.forward.heads import Head, LanguageModel
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.forward.lora import has_adapters
from kedge.models.forward.merging import merge
from kedge.models.forward.sharding import fill_of, shard_model
from kedge.models.loading.load import DTypeName, dtype_for
from kedge.models.loading.start import prepare_layers, without_dropout
from kedge.models.loading.unread import merged_unread
from kedge.models.reward.ensemble import Ensemble, load_reward
from kedge.models.reward.reward_model import RewardModel, head_of
from kedge.models.roles.actor_critic import (
    Critic,
    Imitation,
    Policy,
    Reference,
    head_from_scores,
    value_head,
)
from kedge.models.settings import AutoSize, BaseBits, LoraSettings, OffloadName, shared_reference
from kedge.models.training.ema import EMA
from kedge.models.training.passes import Passes, Report
from kedge.models.training.train_step import TrainStep, trained_weights

Masters = Sequence[nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What the roles are built from and how they are trained."""

    base: str
    """The model that the policy starts from, and that the reference is."""
    reward: Path | None
    """The reward model, which may share weights with the policy and be the start of the critic; None without one."""
    objective: str | None
    """The objective of the reward model that the critic predicts; None where it has a single one."""
    critic_from_reward: bool
    """Whether the critic starts from the reward model."""
    device: str
    dtype: DTypeName
    lora: LoraSettings
    trunk_layers: int | None
    """How many of the lowest layers the roles share, for `trunk`; None for the lower half."""
    actor: OptimiserSettings
    critic: OptimiserSettings | None
    """None for a method without a critic."""
    actor_steps: int
    """Optimiser steps of the whole run, for the learning rate schedule."""
    critic_steps: int
    temperature: float
    """Of sampling: log-probs are those of the distribution that answers are drawn from."""
    rows: AutoSize
    """Sequences of a pass, or `auto`."""
    recompute: bool
    """Recompute activations in the backward pass instead of keeping them."""
    ema: float | None
    """Decay of a moving average of the policy's weights, which is then what is saved."""
    imitation: Imitation | None
    seed: int
    offload: frozenset[OffloadName] = frozenset()
    """What is in host memory between its turns."""
    frozen_bits: BaseBits = 16
    """Bits a weight of a reference that is a model of its own."""
    compile: bool = False
    """Compile the layers of every role."""
    report: Report = lambda level, code, message: None
    """Takes an event: what size of passes was chosen, and when it was halved."""
    world: World = ALONE
    """The processes that hold these roles together: each computes its share of the rows."""

    def passes(self, owner: str) -> Passes:
        return Passes(self.rows, report=self.report, owner=owner, world=self.world)


def narrowed(spec: RoleSpec, model: PreTrainedModel) -> Masters:
    """Weights that were read in float32, from here on in the type that the role computes in; what they were of those
    that learn. A backbone is made after that."""
    shard(spec, model)
    dtype = dtype_for(spec.dtype, spec.device)
    return trained_weights(model, dtype=dtype, on_host="optimiser" in spec.offload).masters


def shard(spec: RoleSpec, model: PreTrainedModel) -> None:
    """Leave this process its part of a model whose weights are prepared, where the processes hold parts."""
    if spec.world.mesh is not None:
        shard_model(model, spec.world.mesh, dtype=dtype_for(spec.dtype, spec.device))


def make_policy(spec: RoleSpec, backbone: Backbone, head: Head, masters: Masters | None = None) -> Policy:
    """`masters` are the weights that learn in float32; without, they start as copies of those in memory."""
    train_step = TrainStep(
        backbone.trainable(),
        spec.actor,
        total_steps=spec.actor_steps,
        owner="policy",
        masters=masters,
        passes=spec.passes("policy"),
        on_host="optimiser" in spec.offload,
    )
    return Policy(
        LanguageModel(backbone=backbone, head=head, compiled=spec.compile),
        train_step,
        temperature=spec.temperature,
        ptx=spec.imitation,
        ema=None if spec.ema is None else EMA(train_step.weights(), spec.ema, device=train_step.device),
    )


def make_critic(
    spec: RoleSpec, settings: OptimiserSettings, backbone: Backbone, head: nn.Linear, masters: Masters | None = None
) -> Critic:
    """`masters` are as for the policy, without those of the head, which is float32."""
    of_head = [(f"value_head.{name}", parameter) for name, parameter in head.named_parameters()]
    train_step = TrainStep(
        [*backbone.trainable(), *of_head],
        settings,
        total_steps=spec.critic_steps,
        owner="critic",
        masters=None if masters is None else [*masters, *head.parameters()],
        passes=spec.passes("critic"),
        on_host="optimiser" in spec.offload,
    )
    return Critic(backbone, head, train_step)


def make_reference(spec: RoleSpec, backbone: Backbone, head: Head, moved: MovedWeights | None = None) -> Reference:
    """`moved` are its weights where they are in host memory between its turns."""
    model = LanguageModel(backbone=backbone, head=head, compiled=spec.compile)
    return Reference(model, temperature=spec.temperature, world=spec.world, moved=moved)


def refuse_moved_reference(spec: RoleSpec, roles: str) -> None:
    """An error where the reference shall move and has no weights of its own."""
    if "reference" in spec.offload:
        raise ConfigError(shared_reference(roles))


def first_member(spec: RoleSpec) -> RewardModel:
    """The reward model, or the first member of an ensemble, in float32: what a critic starts from."""
    assert spec.reward is not None
    unread = spec.world.mesh is not None
    loaded = load_reward(spec.reward, dtype="float32", device=spec.device, unread=unread)
    return loaded.members[0] if isinstance(loaded, Ensemble) else loaded


def plain(member: RewardModel) -> PreTrainedModel:
    """The model of a member, its adapter merged in if it has one."""
    if fill_of(member.model) is not None:
        return merged_unread(member.model, member.adapter) if has_adapters(member.model) else member.model
    return merge(member.model, name=member.adapter) if has_adapters(member.model) else member.model


def critic_head(spec: RoleSpec, member: RewardModel | None, width: int) -> nn.Linear:
    """A value head from the score head of the reward model, or, without one, a head of zeros."""
    if member is None:
        return value_head(width, torch.device(spec.device))
    member.activate()
    weight_KD = head_of(member.model).weight.detach().to(spec.device).clone()
    return head_from_scores(weight_KD, member.facts, spec.objective)


def width_of(model: PreTrainedModel) -> int:
    """Of its hidden states: what its output matrix reads, which in some models is narrower than the layers."""
    head = model.get_output_embeddings()
    return cast(int, getattr(head, "in_features", None) or model.config.get_text_config().hidden_size)


def prepare(spec: RoleSpec, model: PreTrainedModel, *, learns: bool, recomputes: bool = False) -> None:
    """Dropout off, trainable or frozen, and, where the spec says so, layers compiled and activations recomputed."""
    without_dropout(model)
    model.requires_grad_(learns)
    prepare_layers(model, compiled=spec.compile, recomputes=spec.recompute and recomputes)
    if spec.recompute and recomputes:
        # transformers recomputes in training mode alone; without dropout it computes the same as evaluation mode.
        model.train()
