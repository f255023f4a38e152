"""The roles that learn, actor and critic, the reference, and all of them as one set.

Policy and reference answer with log-probs at the sampling temperature. The critic has a linear head with a bias on a
backbone of its own; it starts from the reward model where there is one: then the value of a prefix is, at first, the
score that the text would have if it ended there. Without one the head starts at zero, and so do all values.
Shape letters: B sequences, T token positions, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.core.batches import Batch
from kedge.core.errors import CheckpointError
from kedge.core.loss import masked, stat_sums, weight_of, weighted_sum, widen
from kedge.core.per import Per
from kedge.core.protocols import PolicyLoss, ValueLoss
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.models.forward import heads
from kedge.models.forward.backbones import Backbone, by_micro_batch, micro_batches
from kedge.models.loading.start import save_causal
from kedge.models.reward.ensemble import Member
from kedge.models.reward.reward_model import RewardFacts
from kedge.models.roles.memory import RoleMemory
from kedge.models.settings import Combine, SaveDType
from kedge.models.training.ema import EMA
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep

Head = Callable[[], Tensor]
"""The output matrix (V, D) as it is now."""


class Reference:
    """Log-probs without gradient: of a frozen model, or of the policy between its updates."""

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        *,
        temperature: float,
        rows: int,
        compiled: bool,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`rows` sequences are computed at once."""
        self._backbone, self._head = backbone, head
        self._temperature, self._rows, self._compiled, self._autocast = temperature, rows, compiled, autocast

    @torch.no_grad()
    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response, 0 elsewhere."""
        with self._backbone.active(), self._autocast():
            return by_micro_batch(rollouts, self._rows, self._logprobs)

    def _logprobs(self, part: Rollouts) -> Tensor:
        predicted_BT = heads.predicted(part.attention_mask_BT, part.response_mask_BT)
        positions_BT = heads.predicting_positions(predicted_BT)
        hidden_ND = self._backbone.hidden(part.tokens_BT, part.attention_mask_BT, positions_BT)
        return heads.logprobs_of(
            self._head(),
            hidden_ND,
            part.tokens_BT,
            predicted_BT,
            temperature=self._temperature,
            compiled=self._compiled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """The PTX mix: a likelihood term on demonstrations (Ouyang et al. 2022, eq. 2), batched by the step's number."""

    batches: Callable[[int], Sequence[Batch]]
    coef: float


class Policy:
    """The actor. `update` is one optimiser step on the loss that it is given."""

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        train_step: TrainStep,
        *,
        temperature: float,
        rows: int,
        inference_rows: int,
        compiled: bool,
        imitation: Imitation | None = None,
        ema: EMA | None = None,
    ) -> None:
        """`rows` sequences are computed at once in an update, `inference_rows` without gradients."""
        self._backbone, self._head, self.train_step = backbone, head, train_step
        self._temperature, self._rows, self._compiled = temperature, rows, compiled
        self._imitation, self._ema = imitation, ema
        self._without_gradients = Reference(
            backbone,
            head,
            temperature=temperature,
            rows=inference_rows,
            compiled=compiled,
            autocast=train_step.autocast,
        )

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response as the policy is now, 0 elsewhere; without gradient."""
        return self._without_gradients.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> dict[str, float]:
        width = experience.rollouts.tokens_BT.shape[1]
        objective: Objective[Experience] = Objective(
            weight=lambda part: float(weight_of(part.rollouts.response_mask_BT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        terms: list[Term[Any]] = [Term(objective=objective, batches=micro_batches(experience, self._rows))]
        if self._imitation:
            batches = self._imitation.batches(self.train_step.step)
            imitating: Objective[Batch] = Objective(
                weight=lambda batch: float(weight_of(batch.counted_BT, "token")), sums=self._imitation_sums
            )
            terms.append(Term(objective=imitating, batches=batches, coef=self._imitation.coef, name="ptx_"))
        with self._backbone.active():
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

    def _sums(self, part: Experience, loss: PolicyLoss, per: Per) -> Sums:
        rollouts = part.rollouts
        mask_BT = rollouts.response_mask_BT
        predicted_BT = heads.predicted(rollouts.attention_mask_BT, mask_BT)
        positions_BT = heads.predicting_positions(predicted_BT)
        hidden_ND = self._backbone.hidden(rollouts.tokens_BT, rollouts.attention_mask_BT, positions_BT)
        logp_BT, entropy_BT = heads.logprobs_and_entropy_of(
            self._head(),
            hidden_ND,
            rollouts.tokens_BT,
            predicted_BT,
            temperature=self._temperature,
            compiled=self._compiled,
        )
        item = loss(logp_BT, entropy_BT, part)
        facts = stat_sums(item, mask_BT) | {"entropy": weighted_sum(entropy_BT.detach(), mask_BT, "token")}
        peaks = {"ratio_max": masked(item.stats_BT["ratio"], mask_BT).max()} if "ratio" in item.stats_BT else {}
        return Sums(
            loss=weighted_sum(item.loss_BT, mask_BT, per),
            facts=facts,
            items=weight_of(mask_BT, "token"),
            peaks=peaks,
        )

    def _imitation_sums(self, batch: Batch) -> Sums:
        batch = batch.to(self._head().device)
        predicted_BT = heads.predicted(batch.segment_BT, batch.counted_BT)
        positions_BT = heads.predicting_positions(predicted_BT)
        hidden_ND = self._backbone.hidden(batch.tokens_BT, batch.segment_BT > 0, positions_BT)
        logp_BT = heads.logprobs_of(self._head(), hidden_ND, batch.tokens_BT, predicted_BT, compiled=self._compiled)
        return Sums(loss=weighted_sum(-logp_BT, batch.counted_BT, "token"), facts={})


class Critic:
    """Values of prefixes. `update` is one optimiser step on the loss that it is given."""

    def __init__(
        self, backbone: Backbone, head: nn.Linear, train_step: TrainStep, *, rows: int, inference_rows: int
    ) -> None:
        """`rows` sequences are computed at once in an update, `inference_rows` without gradients."""
        self._backbone, self._head, self.train_step = backbone, head, train_step
        self._rows, self._inference_rows = rows, inference_rows

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """`values_BT` on the response as the critic is now, 0 elsewhere; without gradient."""
        with self._backbone.active(), self.train_step.autocast():
            return by_micro_batch(rollouts, self._inference_rows, self._values)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        width = targets.rollouts.tokens_BT.shape[1]
        objective: Objective[ValueTargets] = Objective(
            weight=lambda part: float(weight_of(part.rollouts.response_mask_BT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        with self._backbone.active():
            return self.train_step.learn(Term(objective=objective, batches=micro_batches(targets, self._rows)))

    def state(self) -> dict[str, Any]:
        return self.train_step.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state)

    def _values(self, part: Rollouts) -> Tensor:
        predicted_BT = heads.predicted(part.attention_mask_BT, part.response_mask_BT)
        positions_BT = heads.predicting_positions(predicted_BT)
        hidden_ND = self._backbone.hidden(part.tokens_BT, part.attention_mask_BT, positions_BT)
        # The head computes in float32, whatever the types of the backbone and of autocast are.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return heads.values_of(widen(hidden_ND), self._head, predicted_BT)

    def _sums(self, part: ValueTargets, loss: ValueLoss, per: Per) -> Sums:
        mask_BT = part.rollouts.response_mask_BT
        item = loss(self._values(part.rollouts), part)
        return Sums(
            loss=weighted_sum(item.loss_BT, mask_BT, per),
            facts=stat_sums(item, mask_BT),
            items=weight_of(mask_BT, "token"),
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


def output_head(model: PreTrainedModel) -> Callable[[], Tensor]:
    """The output matrix as it is when it is asked for."""
    return lambda: heads.lm_head(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJudge:
    """A reward model that shares most of its weights with the policy."""

    members: tuple[Member, ...]
    combine: Combine


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
        if state["reference"] != self.reference_hash:
            raise CheckpointError(
                f"the reference of this run had the content hash {state['reference']}, and the weights it would go on "
                f"with have {self.reference_hash}; put the model back that the run was started from"
            )
        self.policy.load(state["policy"])
        self.critic.load(state["critic"])

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path, *, dtype: SaveDType = "float32") -> Path:
        """Save the policy as a whole model, its adapter beside it; with `ema`, the moving average of its weights."""
        return save_causal(self.model, tokenizer, folder, weights=self.policy.final_weights(), dtype=dtype)
