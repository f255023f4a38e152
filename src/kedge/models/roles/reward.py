"""The reward role: a frozen scorer that packs its rows and computes the last layer only at their last tokens.

Shape letters: B sequences, T token positions, K objectives, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase

from kedge.core.loss import widen
from kedge.models.forward.heads import last_token
from kedge.models.forward.lora import base_of
from kedge.models.forward.packing import compile_layers
from kedge.models.loading.start import without_dropout
from kedge.models.reward.reward_model import RewardFacts, RewardModel, head_of
from kedge.models.roles.backbones import Backbone, FullBackbone, LoraBackbone


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRole:
    """Gives the scores of `kedge.models.reward.reward_model.RewardModel`, faster; rows must be padded on the right."""

    backbone: Backbone
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
        with self.backbone.active():
            last_BD = self.backbone.hidden(tokens_BT.to(self.device), mask_BT, last_token(mask_BT))
        scores_BK = linear(widen(last_BD), self.head_KD)
        return self.facts.normaliser(scores_BK) if normalised else scores_BK


def reward_role(member: RewardModel, *, compiled: bool) -> RewardRole:
    """A reward model with weights of its own as a role: frozen, without dropout, its layers compiled if asked."""
    model = member.model
    member.activate()
    head_KD = head_of(model).weight.detach().clone()
    without_dropout(model.eval())
    model.requires_grad_(False)  # after `activate`, which makes an adapter trainable
    if compiled:
        compile_layers(base_of(model))
    backbone = LoraBackbone(model, member.adapter) if isinstance(model, PeftModel) else FullBackbone(model)
    return RewardRole(backbone=backbone, head_KD=head_KD, tokenizer=member.tokenizer, facts=member.facts)
