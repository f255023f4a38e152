"""A backbone and an output matrix: log-probs of tokens, from packed rows, of a policy or of a reference.

Masks are on the host, where passes are laid out. `active` is entered around a computation with its backward pass.
Shape letters: B rows, T token positions, N predicted tokens, D width, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.batches import send
from kedge.models.forward import heads
from kedge.models.forward.backbones import Backbone, backbone_of, base_backbone_of
from kedge.models.forward.heads import Head, Targets, output_head


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    backbone: Backbone
    head: Head
    compiled: bool = False
    """Whether the work on logits is compiled (torch.compile)."""

    @property
    def device(self) -> torch.device:
        return self.head().device

    def active(self) -> AbstractContextManager[None]:
        return self.backbone.active()

    def hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor, only_BT: Tensor) -> tuple[Tensor, Targets]:
        """The hidden states (N, D) that predict the tokens in `only_BT`, and which tokens these are."""
        targets = heads.targets(attention_mask_BT, only_BT, self.device)
        return self.backbone.hidden(tokens_BT, attention_mask_BT, targets.read_BT), targets

    def logprobs(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, only_BT: Tensor, *, temperature: float = 1.0
    ) -> Tensor:
        """`logp_BT` of the tokens in `only_BT` in float32, 0 elsewhere, on the device of the model."""
        tokens_BT = send(tokens_BT, self.device)
        hidden_ND, targets = self.hidden(tokens_BT, attention_mask_BT, only_BT)
        return heads.token_logprobs(
            self.head(), hidden_ND, tokens_BT, targets, temperature=temperature, compiled=self.compiled
        )

    def logprobs_and_entropy(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, only_BT: Tensor, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, and the entropy of the distribution that each of these tokens was drawn from."""
        tokens_BT = send(tokens_BT, self.device)
        hidden_ND, targets = self.hidden(tokens_BT, attention_mask_BT, only_BT)
        return heads.logprobs_and_entropy(
            self.head(), hidden_ND, tokens_BT, targets, temperature=temperature, compiled=self.compiled
        )


def language_model(model: PreTrainedModel, *, compiled: bool = False) -> LanguageModel:
    """A whole model; with adapters, the one that is active now is a part of it."""
    return LanguageModel(backbone=backbone_of(model), head=output_head(model), compiled=compiled)


def base_language_model(model: PreTrainedModel) -> LanguageModel:
    """The same without its adapters."""
    return LanguageModel(backbone=base_backbone_of(model), head=output_head(model))
