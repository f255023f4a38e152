"""The reward role where it shares weights with the others: a scorer over a body, as a member of a judge.

Shape letters: B sequences, T token positions, K objectives, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase

from kedge.core.loss import widen
from kedge.models.heads import last_token
from kedge.models.reward_model import RewardFacts
from kedge.models.roles.bodies import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReward:
    """Reads what `kedge.models.reward_model.RewardModel` reads, and says the same."""

    body: Body
    head_KD: Tensor
    tokenizer: PreTrainedTokenizerBase
    facts: RewardFacts

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.facts.objectives

    @property
    def device(self) -> torch.device:
        return self.head_KD.device

    @torch.no_grad()
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_BK` in float32. Rows are right-padded, one text each."""
        mask_BT = attention_mask_BT.to(self.device)
        with self.body.active():
            last_BD = self.body.hidden(tokens_BT.to(self.device), mask_BT, last_token(mask_BT))
        scores_BK = linear(widen(last_BD), self.head_KD)
        return self.facts.normaliser(scores_BK) if normalised else scores_BK
