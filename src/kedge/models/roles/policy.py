"""The policy that is trained and the frozen reference. Both give log-probs at the temperature of sampling.

Shape letters: B sequences, T token positions, N response tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.core.batches import Batch
from kedge.core.loss import masked, stat_sums, weight_of, weighted_sum
from kedge.core.per import Per
from kedge.core.protocols import PolicyLoss
from kedge.core.records import Experience, Rollouts
from kedge.models.forward import heads
from kedge.models.roles.backbones import Backbone, by_micro_batch, micro_batches
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
