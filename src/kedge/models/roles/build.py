"""What the roles of PPO are built from (`RoleSpec`), the result (`RoleSet`), and what all ways to build them share.

`separate` loads four models, `lora` puts adapters on one base, `trunk` puts upper layers on one trunk. What differs is
where hidden states come from; the roles themselves, their optimisers and their states are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.core.errors import CheckpointError
from kedge.core.optimiser import OptimiserSettings
from kedge.models.forward import heads
from kedge.models.forward.lora import Module, base_of, merge
from kedge.models.forward.packing import compile_layers
from kedge.models.loading.load import DTypeName
from kedge.models.loading.start import save_causal, without_dropout
from kedge.models.reward.ensemble import Ensemble, Member, load_reward
from kedge.models.reward.reward_model import RewardModel, head_of
from kedge.models.roles.backbones import Backbone
from kedge.models.roles.critic import Critic, NoCritic, head_from_scores, value_head
from kedge.models.roles.memory import RoleMemory
from kedge.models.roles.policy import Imitation, Policy, Reference
from kedge.models.settings import Combine, LoraSettings
from kedge.models.training.ema import EMA
from kedge.models.training.train_step import TrainStep

RoleKind = Literal["separate", "lora", "trunk"]

_INFERENCE_FACTOR = 4
"""On a GPU, so many times the rows of an update are computed at once without gradients: that keeps one layer's
activations instead of all layers', so it takes less memory than an update, and each launch does four times the work."""


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
    rows: int
    """Sequences of a micro-batch."""
    recompute: bool
    """Recompute activations in the backward pass instead of keeping them."""
    ema: float | None
    """Decay of a moving average of the policy's weights, which is then what is saved."""
    imitation: Imitation | None
    seed: int
    compile: bool = False
    """Compile the layers of every role."""

    @property
    def inference_rows(self) -> int:
        """Sequences at once without gradients. With `recompute`, an update too keeps one layer's activations alone."""
        fits_more = torch.device(self.device).type == "cuda" and not self.recompute
        return self.rows * (_INFERENCE_FACTOR if fits_more else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJudge:
    """A reward model that shares most of its weights with the policy."""

    members: tuple[Member, ...]
    combine: Combine


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSet:
    """The roles of a run."""

    model: Module
    """The policy with all its weights: the model that samples and is saved."""
    policy: Policy
    critic: Critic | NoCritic
    reference: Reference
    shared_judge: SharedJudge | None
    """The reward model at `RoleSpec.reward` where it shares weights with the policy; any other is loaded elsewhere."""
    memory: Sequence[RoleMemory]
    """The rows of the memory table."""
    notes: Sequence[str]
    """What a user should know about what could not be shared."""
    reference_hash: str
    """Hash of the reference's weights: a run is resumed with the same reference, or not at all."""
    forget: Callable[[], None] = field(default=lambda: None)
    """To be called after each batch of rollouts: frees what was cached for it."""

    def state(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state(),
            "critic": self.critic.state(),
            "reference": self.reference_hash,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["reference"] != self.reference_hash:
            raise CheckpointError(
                f"the reference of this run had the content hash {state['reference']}, and the weights it would go on "
                f"with have {self.reference_hash}; put the model back that the run was started from"
            )
        self.policy.load(state["policy"])
        self.critic.load(state["critic"])

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
        """Save the policy as a whole model: with `ema`, the moving average of its weights."""
        last = {name: weight.clone() for name, weight in self.policy.weights().items()}
        self.policy.train_step.load_weights(self.policy.final_weights())
        try:
            return save_causal(self.model, tokenizer, folder)
        finally:
            self.policy.train_step.load_weights(last)


def make_policy(spec: RoleSpec, backbone: Backbone, head: Callable[[], Tensor]) -> Policy:
    train_step = TrainStep(backbone.trainable(), spec.actor, total_steps=spec.actor_steps, owner="policy")
    return Policy(
        backbone,
        head,
        train_step,
        temperature=spec.temperature,
        rows=spec.rows,
        inference_rows=spec.inference_rows,
        compiled=spec.compile,
        imitation=spec.imitation,
        ema=None if spec.ema is None else EMA(train_step.weights(), spec.ema),
    )


def make_critic(spec: RoleSpec, settings: OptimiserSettings, backbone: Backbone, head: nn.Linear) -> Critic:
    of_head = [(f"value_head.{name}", parameter) for name, parameter in head.named_parameters()]
    named = [*backbone.trainable(), *of_head]
    train_step = TrainStep(named, settings, total_steps=spec.critic_steps, owner="critic")
    return Critic(backbone, head, train_step, rows=spec.rows, inference_rows=spec.inference_rows)


def make_reference(spec: RoleSpec, backbone: Backbone, head: Callable[[], Tensor], policy: Policy) -> Reference:
    return Reference(
        backbone,
        head,
        temperature=spec.temperature,
        rows=spec.inference_rows,
        compiled=spec.compile,
        # The precision of the policy: before the first step the two must agree to the last bit.
        autocast=policy.train_step.autocast,
    )


def output_head(model: PreTrainedModel) -> Callable[[], Tensor]:
    """The output matrix as it is when it is asked for."""
    return lambda: heads.lm_head(model)


def load_members(spec: RoleSpec) -> tuple[RewardModel, ...]:
    """The members of the reward model; a single one where it is no ensemble."""
    assert spec.reward is not None
    loaded = load_reward(spec.reward, dtype=spec.dtype, device=spec.device)
    return loaded.members if isinstance(loaded, Ensemble) else (loaded,)


def plain(member: RewardModel) -> PreTrainedModel:
    """The model of a member, its adapter merged in if it has one."""
    return merge(member.model, name=member.adapter) if isinstance(member.model, PeftModel) else member.model


def critic_head(spec: RoleSpec, member: RewardModel | None, width: int) -> nn.Linear:
    """A value head from the score head of the reward model, or, without one, a head of zeros."""
    if member is None:
        return value_head(width, torch.device(spec.device))
    member.activate()
    weight_KD = head_of(member.model).weight.detach().clone()
    return head_from_scores(weight_KD, member.facts, spec.objective)


def width_of(model: Module) -> int:
    return cast(int, base_of(model).config.get_text_config().hidden_size)


def prepare(spec: RoleSpec, model: Module, *, learns: bool, recomputes: bool = False) -> None:
    """Dropout off, trainable or frozen, and, where the spec says so, layers compiled and activations recomputed."""
    without_dropout(model)
    model.requires_grad_(learns)
    if spec.compile:
        compile_layers(base_of(model))
    if spec.recompute and recomputes:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
        # transformers recomputes in training mode alone; without dropout it computes the same as evaluation mode.
        model.train()
