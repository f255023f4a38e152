"""The policy that learns, and the reference that holds still. Both answer with log-probs at the sampling temperature.

Shape letters: B sequences, T token positions, V vocabulary, D width.
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
from kedge.models.roles.backbones import Backbone
from kedge.models.roles.rows import each, micro_batches
from kedge.models.training.ema import EMA
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep

Head = Callable[[], Tensor]
"""The output matrix (V, D) as it is now."""


class Reference:
    """Log-probs of a model that does not learn."""

    def __init__(
        self,
        body: Backbone,
        head: Head,
        *,
        temperature: float,
        rows: int,
        compiled: bool,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._body, self._head = body, head
        self._temperature, self._rows, self._compiled, self._autocast = temperature, rows, compiled, autocast

    @torch.no_grad()
    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response, 0 elsewhere."""
        with self._body.active(), self._autocast():
            return each(rollouts, self._rows, self._ask)

    def _ask(self, part: Rollouts) -> Tensor:
        wanted_BT = heads.foretold(part.attention_mask_BT, part.response_mask_BT)
        hidden_ND = self._body.hidden(part.tokens_BT, part.attention_mask_BT, heads.one_before(wanted_BT))
        return heads.logprobs_of(
            self._head(),
            hidden_ND,
            part.tokens_BT,
            wanted_BT,
            temperature=self._temperature,
            compiled=self._compiled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """The PTX mix: text to imitate alongside (Ouyang et al. 2022, eq. 2), chosen by the number of the step."""

    batches: Callable[[int], Sequence[Batch]]
    coef: float


class Policy:
    """The actor. `update` is one optimiser step of whatever loss it is given."""

    def __init__(
        self,
        body: Backbone,
        head: Head,
        stepper: TrainStep,
        *,
        temperature: float,
        rows: int,
        still_rows: int,
        compiled: bool,
        imitation: Imitation | None = None,
        average: EMA | None = None,
    ) -> None:
        """`rows` sequences are learnt from at once, `still_rows` asked. `average` follows the weights."""
        self._body, self._head, self.stepper = body, head, stepper
        self._temperature, self._rows, self._compiled = temperature, rows, compiled
        self._imitation, self._average = imitation, average
        self._still = Reference(
            body, head, temperature=temperature, rows=still_rows, compiled=compiled, autocast=stepper.autocast
        )

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """`logp_BT` on the response as the policy is now, 0 elsewhere; without gradient."""
        return self._still.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> dict[str, float]:
        width = experience.rollouts.tokens_BT.shape[1]
        objective: Objective[Experience] = Objective(
            weight=lambda part: float(weight_of(part.rollouts.response_mask_BT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        terms: list[Term[Any]] = [Term(objective=objective, batches=micro_batches(experience, self._rows))]
        if self._imitation:
            batches = self._imitation.batches(self.stepper.step)
            imitating: Objective[Batch] = Objective(
                weight=lambda batch: float(weight_of(batch.counted_BT, "token")), sums=self._imitated
            )
            terms.append(Term(objective=imitating, batches=batches, coef=self._imitation.coef, name="ptx_"))
        with self._body.active():
            metrics = self.stepper.learn(*terms)
        if self._average:
            self._average.follow(self.stepper.weights())
        return metrics

    def state(self) -> dict[str, Any]:
        return {"stepper": self.stepper.state(), "average": self._average.state() if self._average else None}

    def load(self, state: Mapping[str, Any]) -> None:
        self.stepper.load(state["stepper"])
        if self._average:
            self._average.load(state["average"])

    def weights(self) -> Mapping[str, Tensor]:
        """What has been learnt, by parameter name, in full precision."""
        return self.stepper.weights()

    def final_weights(self) -> Mapping[str, Tensor]:
        """What a finished run keeps: the average of the weights where one is kept, else the weights."""
        return self._average.weights() if self._average else self.stepper.weights()

    def _sums(self, part: Experience, loss: PolicyLoss, per: Per) -> Sums:
        tokens = part.rollouts
        mask_BT = tokens.response_mask_BT
        wanted_BT = heads.foretold(tokens.attention_mask_BT, mask_BT)
        hidden_ND = self._body.hidden(tokens.tokens_BT, tokens.attention_mask_BT, heads.one_before(wanted_BT))
        logp_BT, entropy_BT = heads.logprobs_and_entropy_of(
            self._head(),
            hidden_ND,
            tokens.tokens_BT,
            wanted_BT,
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

    def _imitated(self, batch: Batch) -> Sums:
        batch = batch.to(self._head().device)
        wanted_BT = heads.foretold(batch.segment_BT, batch.counted_BT)
        hidden_ND = self._body.hidden(batch.tokens_BT, batch.segment_BT > 0, heads.one_before(wanted_BT))
        logp_BT = heads.logprobs_of(self._head(), hidden_ND, batch.tokens_BT, wanted_BT, compiled=self._compiled)
        return Sums(loss=weighted_sum(-logp_BT, batch.counted_BT, "token"), facts={})
