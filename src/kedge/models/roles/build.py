"""The four roles of PPO, built from a policy and a reward model, and the parts that all ways to hold them share.

`separate` loads four models, `lora` puts adapters on one, `trunk` puts tops on one. What differs is where hidden
states come from; the roles themselves, their optimisers and their states are the same.
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
from kedge.models.forward.compiling import compile_layers
from kedge.models.forward.lora import Module, base_of, merge
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

_STILL_ON_GPU = 4
"""So many times the rows are asked at once without gradients on a GPU: they hold one layer's activations instead of all
layers', so this takes less memory than learning does, and each launch does four times the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """What the roles are made of and how they learn."""

    base: str
    """The policy to start from, and the reference."""
    reward: Path | None
    """The reward model that the critic starts from and that shares weights where it can; None without one."""
    objective: str | None
    """Which of its objectives the critic foretells; None where it has one."""
    critic_from_reward: bool
    device: str
    dtype: DTypeName
    lora: LoraSettings
    trunk_layers: int | None
    """None: the lower half."""
    actor: OptimiserSettings
    critic: OptimiserSettings | None
    """None for a method without a critic."""
    actor_steps: int
    critic_steps: int
    temperature: float
    rows: int
    recompute: bool
    ema: float | None
    imitation: Imitation | None
    seed: int
    compile: bool = False
    """Compile the layers of every role."""

    @property
    def still_rows(self) -> int:
        """Rows at once where nothing is learnt. With `recompute`, learning too holds one layer's activations."""
        is_ample = torch.device(self.device).type == "cuda" and not self.recompute
        return self.rows * (_STILL_ON_GPU if is_ample else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJudge:
    """A reward model whose weights are, for the most part, those of the policy."""

    members: tuple[Member, ...]
    combine: Combine


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSet:
    """The roles that learn or hold still, and what surrounds them."""

    model: Module
    """Samples and is saved: the policy with all its weights."""
    policy: Policy
    critic: Critic | NoCritic
    reference: Reference
    shared_judge: SharedJudge | None
    """The reward model at `Wanted.reward` where it shares weights with the policy; else it is loaded by itself."""
    memory: Sequence[RoleMemory]
    notes: Sequence[str]
    """What a user should know about how the roles are held."""
    reference_hash: str
    forget: Callable[[], None] = field(default=lambda: None)
    """Called when a batch of rollouts is done with."""

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
        """Write the policy as a whole model; where an average is kept, that is what is written."""
        now = {name: one.clone() for name, one in self.policy.stepper.weights().items()}
        self.policy.stepper.load_weights(self.policy.final_weights())
        try:
            return save_causal(self.model, tokenizer, folder)
        finally:
            self.policy.stepper.load_weights(now)


def make_policy(wanted: RoleSpec, body: Backbone, head: Callable[[], Tensor]) -> Policy:
    stepper = TrainStep(body.trainable(), wanted.actor, total_steps=wanted.actor_steps, owner="policy")
    return Policy(
        body,
        head,
        stepper,
        temperature=wanted.temperature,
        rows=wanted.rows,
        still_rows=wanted.still_rows,
        compiled=wanted.compile,
        imitation=wanted.imitation,
        average=None if wanted.ema is None else EMA(stepper.weights(), wanted.ema),
    )


def make_critic(wanted: RoleSpec, settings: OptimiserSettings, body: Backbone, head: nn.Linear) -> Critic:
    named = [*body.trainable(), *((f"value_head.{name}", one) for name, one in head.named_parameters())]
    stepper = TrainStep(named, settings, total_steps=wanted.critic_steps, owner="critic")
    return Critic(body, head, stepper, rows=wanted.rows, still_rows=wanted.still_rows)


def make_reference(wanted: RoleSpec, body: Backbone, head: Callable[[], Tensor], policy: Policy) -> Reference:
    # In the same precision as the policy: before the first step the two must agree to the last bit.
    autocast = policy.stepper.autocast
    return Reference(
        body,
        head,
        temperature=wanted.temperature,
        rows=wanted.still_rows,
        compiled=wanted.compile,
        autocast=autocast,
    )


def output_head(model: PreTrainedModel) -> Callable[[], Tensor]:
    return lambda: heads.lm_head(model)


def load_members(wanted: RoleSpec) -> tuple[RewardModel, ...]:
    """The reward model's members, each a plain model of its own where adapters were on a base."""
    assert wanted.reward is not None
    found = load_reward(wanted.reward, dtype=wanted.dtype, device=wanted.device)
    return found.members if isinstance(found, Ensemble) else (found,)


def plain(member: RewardModel) -> PreTrainedModel:
    return merge(member.model, name=member.adapter) if isinstance(member.model, PeftModel) else member.model


def critic_head(wanted: RoleSpec, member: RewardModel | None, width: int) -> nn.Linear:
    """From the reward model's own head, or one that says 0."""
    if member is None:
        return value_head(width, torch.device(wanted.device))
    member.activate()
    weight_KD = head_of(member.model).weight.detach().clone()
    return head_from_scores(weight_KD, member.facts, wanted.objective)


def width_of(model: Module) -> int:
    return cast(int, base_of(model).config.get_text_config().hidden_size)


def prepare(wanted: RoleSpec, model: Module, *, learns: bool, recomputes: bool = False) -> None:
    """Dropout off, gradients for those that learn, layers compiled and activations recomputed if asked."""
    without_dropout(model)
    model.requires_grad_(learns)
    if wanted.compile:
        compile_layers(base_of(model))
    if wanted.recompute and recomputes:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": False})
        # transformers recomputes in training mode alone; without dropout the two modes are the same.
        model.train()
