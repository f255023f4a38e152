"""The roles that learn, actor and critic, the reference, and all of them as one set.

Policy and reference answer with log-probs at the sampling temperature. The critic has a linear head with a bias on a
backbone of its own; it starts from the reward model where there is one: then the value of a prefix is, at first, the
score that the text would have if it ended there. Without one the head starts at zero, and so do all values.
Shape letters: B sequences, T token positions, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.core.batches import Batch
from kedge.core.errors import CheckpointError
from kedge.core.loss import masked, stat_sums, weight_of, weighted_sum, widen
from kedge.core.optimiser import Per
from kedge.core.protocols import PolicyLoss, ValueLoss
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.core.world import ALONE, World
from kedge.models.forward import heads
from kedge.models.forward.backbones import Backbone, Part, RecordT, micro_batches
from kedge.models.forward.heads import LanguageModel
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.forward.sharding import is_sharded, whole_copy
from kedge.models.reward.ensemble import Member
from kedge.models.reward.reward_model import RewardFacts
from kedge.models.roles.memory import RoleMemory
from kedge.models.settings import Combine
from kedge.models.training.ema import EMA
from kedge.models.training.objectives import imitation
from kedge.models.training.passes import Cut, InferenceSize
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep


class Reference:
    """Log-probs without gradient: of a frozen model, or of the policy between its updates."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        temperature: float,
        world: World = ALONE,
        moved: MovedWeights | None = None,
    ) -> None:
        """The processes of `world` share the rows. `moved` are weights that are here while they are asked alone."""
        self._model, self._temperature, self._moved = model, temperature, moved
        self._inference = InferenceSize(model.device, world=world)

    @torch.no_grad()
    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response, 0 elsewhere."""
        with self._moved.turn() if self._moved else nullcontext(), self._model.active():
            return _by_pass(rollouts, self._inference, self._logprobs)

    def _logprobs(self, part: Part[Rollouts]) -> Tensor:
        return self._model.logprobs(
            part.record.tokens_BT, part.attention_mask_RT, part.response_mask_RT, temperature=self._temperature
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """The PTX mix: a likelihood term on demonstrations (Ouyang et al. 2022, eq. 2), batched by the step's number."""

    batches: Callable[[int], Cut[Batch]]
    coef: float


class Policy:
    """The actor. `update` is one optimiser step on the loss that it is given."""

    def __init__(
        self,
        model: LanguageModel,
        train_step: TrainStep,
        *,
        temperature: float,
        ptx: Imitation | None = None,
        ema: EMA | None = None,
    ) -> None:
        self._model, self.train_step, self._temperature = model, train_step, temperature
        self._imitation, self._ema = ptx, ema
        self._without_gradients = Reference(model, temperature=temperature, world=train_step.passes.world)

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response as the policy is now, 0 elsewhere; without gradient."""
        return self._without_gradients.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> dict[str, float]:
        width = experience.rollouts.tokens_BT.shape[1]
        objective: Objective[Part[Experience]] = Objective(
            weight=lambda part: float(weight_of(part.response_mask_RT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        terms: list[Term[Any]] = [Term(objective=objective, batches=_cut(experience))]
        if self._imitation:
            batches = self._imitation.batches(self.train_step.step)
            imitating = imitation(self._model)
            terms.append(Term(objective=imitating, batches=batches, coef=self._imitation.coef, name="ptx_"))
        with self._model.active():
            metrics = self.train_step.learn(*terms)
        if self._ema:
            self._ema.update(self.train_step.weights())
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights by the names of their parameters, in full precision: what a generator has to load.

        They are the tensors of the policy itself, which the next update changes; copy what has to last.
        """
        return self.train_step.weights()

    def final_weights(self) -> Mapping[str, Tensor]:
        """The weights that a finished run saves: their moving average with `ema`, else the last ones."""
        return self._ema.weights() if self._ema else self.weights()

    def state(self) -> dict[str, Any]:
        return {"train_step": self.train_step.state(), "ema": self._ema.state() if self._ema else None}

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state["train_step"])
        if self._ema:
            self._ema.load(state["ema"])

    def _sums(self, part: Part[Experience], loss: PolicyLoss, per: Per) -> Sums:
        rollouts = part.record.rollouts
        mask_BT = rollouts.response_mask_BT
        logp_BT, entropy_BT = self._model.logprobs_and_entropy(
            rollouts.tokens_BT, part.attention_mask_RT, part.response_mask_RT, temperature=self._temperature
        )
        item = loss(logp_BT, entropy_BT, part.record)
        facts = stat_sums(item, mask_BT) | {"entropy": weighted_sum(entropy_BT.detach(), mask_BT, "token")}
        peaks = {"ratio_max": masked(item.stats_BT["ratio"], mask_BT).max()} if "ratio" in item.stats_BT else {}
        return Sums(
            loss=weighted_sum(item.loss_BT, mask_BT, per),
            facts=facts,
            items=weight_of(mask_BT, "token"),
            peaks=peaks,
        )


class Critic:
    """Values of prefixes. `update` is one optimiser step on the loss that it is given."""

    def __init__(self, backbone: Backbone, head: nn.Linear, train_step: TrainStep) -> None:
        self._backbone, self._head, self.train_step = backbone, head, train_step
        self._inference = InferenceSize(head.weight.device, world=train_step.passes.world)

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """`values_BT` on the response as the critic is now, 0 elsewhere; without gradient."""
        with self._backbone.active():
            return _by_pass(rollouts, self._inference, self._rollout_values)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        width = targets.rollouts.tokens_BT.shape[1]
        objective: Objective[Part[ValueTargets]] = Objective(
            weight=lambda part: float(weight_of(part.response_mask_RT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        with self._backbone.active():
            return self.train_step.learn(Term(objective=objective, batches=_cut(targets)))

    def state(self) -> dict[str, Any]:
        return self.train_step.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state)

    def _rollout_values(self, part: Part[Rollouts]) -> Tensor:
        return self._values(part.record, part)

    def _values(self, rollouts: Rollouts, part: Part[Any]) -> Tensor:
        targets = heads.targets(part.attention_mask_RT, part.response_mask_RT, self._head.weight.device)
        hidden_ND = self._backbone.hidden(rollouts.tokens_BT, part.attention_mask_RT, targets.read_BT)
        # The head computes in float32, whatever the type of the backbone is.
        return heads.values_of(widen(hidden_ND), self._head, targets)

    def _sums(self, part: Part[ValueTargets], loss: ValueLoss, per: Per) -> Sums:
        rollouts = part.record.rollouts
        item = loss(self._values(rollouts, part), part.record)
        return Sums(
            loss=weighted_sum(item.loss_BT, rollouts.response_mask_BT, per),
            facts=stat_sums(item, rollouts.response_mask_BT),
            items=weight_of(rollouts.response_mask_BT, "token"),
        )


class NoCritic:
    """In the place of a critic for methods without one: all values are 0, updates do nothing, the state is empty."""

    def values(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(rollouts.tokens_BT.shape, device=rollouts.tokens_BT.device)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        del targets, loss, per
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        del state


def _cut(record: RecordT) -> Cut[Part[RecordT]]:
    return lambda size: micro_batches(record, rows=size.rows, tokens=size.tokens, shares=size.shares)


def _by_pass(rollouts: Rollouts, inference: InferenceSize, compute: Callable[[Part[Rollouts]], Tensor]) -> Tensor:
    """`compute` on every part, as one (B, T) tensor in the order of `rollouts`; 0 where rows were trimmed."""
    result_BT = torch.zeros(rollouts.tokens_BT.shape, dtype=torch.float32, device=rollouts.tokens_BT.device)
    for part, part_RT in inference.each(_cut(rollouts), lambda part: (part, compute(part))):
        result_BT[:, : part_RT.shape[1]].index_copy_(0, part.index_R, part_RT.float().to(result_BT.device))
    inference.world.add(result_BT)  # a row is 0 on all processes but one
    return result_BT


def value_head(width: int, device: torch.device) -> nn.Linear:
    """A head whose values are all 0."""
    head = nn.Linear(width, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def head_from_scores(weight_KD: Tensor, facts: RewardFacts, objective: str | None) -> nn.Linear:
    """A head whose values are the normalised scores of one objective: (w h - mean) / std as one linear map."""
    head = value_head(weight_KD.shape[1], weight_KD.device)
    index = facts.objectives.index(objective) if objective else 0
    mean, std = facts.normaliser.mean[index], facts.normaliser.std[index]
    head.weight.copy_(weight_KD[index : index + 1].float() / std)
    head.bias.fill_(-mean / std)
    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJudge:
    """A reward model that shares most of its weights with the policy."""

    members: tuple[Member, ...]
    combine: Combine


def published(model: PreTrainedModel, policy: Policy) -> Mapping[str, Tensor]:
    """The policy's weights for a generator. Where they are sharded there are none to hand over: the whole copy that it
    samples from is filled with them."""
    whole_copy(model)
    return {} if is_sharded(model) else policy.weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSet:
    """The roles of a run."""

    model: PreTrainedModel
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
        refuse_other_reference(state["reference"], self.reference_hash)
        self.policy.load(state["policy"])
        self.critic.load(state["critic"])


def refuse_other_reference(before: str, now: str) -> None:
    """An error where the reference's weights do not have the hash that they had when the run was saved."""
    if before != now:
        raise CheckpointError(
            f"the reference of this run had the content hash {before}, and the weights it would go on with have {now}; "
            "put the model back that the run was started from"
        )
