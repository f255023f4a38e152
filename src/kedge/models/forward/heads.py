"""From hidden states to log-probs, entropies, values and KL of tokens. The only place that shifts by one.

`LanguageModel` is a backbone and an output matrix: what gives log-probs in every stage. The output at position t
predicts token t+1; in every result of this module, index t is about token t, and the first token of a row has 0. Rows
are one sequence each, padded on the right. Masks are on the host, where it is worked out which tokens are predicted, so
that nothing here waits for the device.
Shape letters: B rows, T token positions, D width, V vocabulary, N predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kedge.algorithms import logprobs
from kedge.core.errors import ModelError
from kedge.core.loss import widen
from kedge.core.records import send
from kedge.models.forward import sharding
from kedge.models.forward.backbones import Backbone, backbone_of, base_backbone_of
from kedge.models.forward.packing import sent
from kedge.models.forward.reader import evaluating, uncompiled

CHUNK_TOKENS: Final = 512
"""Tokens whose logits `token_kl` holds in memory at once: 300 MiB a model for 150 thousand entries in float32."""
_LOGIT_CHANGES: Final = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)
"""Settings of models that change the logits after the head; at None or 1 they do nothing."""
_PROBE_TOKENS: Final = 8
_MAX_DISTANCE: Final = 1e-4, 0.01
"""Mean difference of logits over their mean size, in float32 and in two-byte types, that rounding may make."""


Head = Callable[[], Tensor]
"""The output matrix (V, D) as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tokens whose predictions are needed, row by row."""

    shape: tuple[int, int]
    """(B, T) of the rows."""
    read_BT: Tensor
    """bool, on the host: True on the positions whose outputs predict them, t−1 for token t."""
    index_N: Tensor
    """Their places in the flattened (B, T), on the device of the model."""

    def of(self, tokens_BT: Tensor) -> Tensor:
        """The tokens themselves (N)."""
        return tokens_BT.flatten().index_select(0, self.index_N)

    def spread(self, x_N: Tensor) -> Tensor:
        """Numbers at their tokens (B, T), and 0 elsewhere."""
        rows, width = self.shape
        return x_N.new_zeros(rows * width).index_copy(0, self.index_N, x_N).view(rows, width)


def targets(attention_mask_BT: Tensor, only_BT: Tensor, device: torch.device | None = None) -> Targets:
    """The tokens in `only_BT` that follow a token of their row. Both masks are on the host; `index_N` is on `device`.

    >>> after = targets(torch.tensor([[1, 1, 1, 0]]).bool(), torch.tensor([[1, 0, 1, 1]]).bool())
    >>> after.index_N.tolist(), after.read_BT.int().tolist()
    ([2], [[0, 1, 0, 0]])
    """
    mask, only = attention_mask_BT.numpy(), only_BT.numpy()
    read = np.zeros_like(mask)
    read[:, :-1] = mask[:, :-1] & mask[:, 1:] & only[:, 1:]
    (index_N,) = sent([read.reshape(-1).nonzero()[0] + 1], device)
    return Targets(shape=(mask.shape[0], mask.shape[1]), read_BT=torch.from_numpy(read), index_N=index_N)


def lm_head(model: PreTrainedModel) -> Tensor:
    """The output matrix (V, D), for models whose logits are hidden states times it and nothing more."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"{sharding.class_name(model)}: expected a linear output head without bias, found {head}")
    for setting in _LOGIT_CHANGES:
        if (value := getattr(model.config, setting, None)) not in (None, 1):
            raise ModelError(
                f"{sharding.class_name(model)} changes its logits after the head ({setting} = {value}), which Kedge "
                "does not compute; log-probs would be wrong. Use a model without it"
            )
    return head.weight


def output_head(model: PreTrainedModel) -> Head:
    """The output matrix of a model that learns, once it is known that its logits are made by that alone."""
    refuse_other_logits(model)
    return lambda: lm_head(model)


@torch.no_grad()
def refuse_other_logits(model: PreTrainedModel) -> None:
    """An error where a model's own logits are not its hidden states times its output matrix: not all that change them
    have a setting which says so."""
    logits_TV, expected_TV = sharding.computing(model, lambda: _logits_both_ways(model))
    distance = (logits_TV.float() - expected_TV.float()).abs().mean()
    if distance > _MAX_DISTANCE[model.dtype.itemsize == 2] * expected_TV.float().abs().mean():
        raise ModelError(
            f"{sharding.class_name(model)} computes more than its output matrix from hidden states to logits (they "
            f"differ by {distance.item():.3g}), which Kedge does not know; log-probs would be wrong. Use another model"
        )


def _logits_both_ways(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The logits (T, V) of a few tokens as the model computes them, and as they are computed here."""
    head_VD = lm_head(model)
    named: dict[str, Any] = {
        "input_ids": torch.arange(_PROBE_TOKENS, device=head_VD.device)[None] % len(head_VD),
        "use_cache": False,
    }
    with evaluating(model), uncompiled(model):
        logits_TV = model.forward(**named).logits[0]  # not by a call, which weights in parts would take for a pass
        hidden_TD = cast(Any, model.get_decoder())(**named).last_hidden_state[0]
    return logits_TV, F.linear(hidden_TD, head_VD)


def token_logprobs(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    targets: Targets,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """`logp_BT[b, t]` = log p(token t | tokens before t) in float32; 0 where it is no target.

    `hidden_ND` are the hidden states at `targets.read_BT`.
    """
    logp_N = logprobs.token_logprobs(
        hidden_ND, head_VD, targets.of(tokens_BT), temperature=temperature, compiled=compiled
    )
    return targets.spread(logp_N)


def logprobs_and_entropy(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    targets: Targets,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the entropy (nats) of the distribution that each token was drawn from."""
    logp_N, entropy_N = logprobs.logprobs_and_entropy(
        hidden_ND, head_VD, targets.of(tokens_BT), temperature=temperature, compiled=compiled
    )
    return targets.spread(logp_N), targets.spread(entropy_N)


def values_of(hidden_ND: Tensor, head: nn.Linear, targets: Targets) -> Tensor:
    """`values_BT[b, t]` = value of the prefix that ends just before token t, in float32; 0 where it is no target.

    `hidden_ND` are the hidden states at `targets.read_BT`.
    """
    return targets.spread(head(hidden_ND).squeeze(-1).float())


def token_kl(
    head_VD: Tensor, hidden_ND: Tensor, ref_head_VD: Tensor, ref_hidden_ND: Tensor, targets: Targets
) -> Tensor:
    """`kl_BT[b, t]` = Σ_v p_ref(v) (log p_ref(v) − log p(v)) of the distributions of token t, 0 where it is no target.

    In float32 at least. Gradients flow to the policy and not to the reference; the N×V logits are computed again in the
    backward pass instead of being kept. Both hidden states are those at `targets.read_BT`.
    """
    parts = [
        cast(
            Tensor,
            checkpoint(
                _kl, hidden_ND[at], head_VD, ref_hidden_ND[at].detach(), ref_head_VD.detach(),
                use_reentrant=False, preserve_rng_state=False,
            ),
        )
        for at in (slice(start, start + CHUNK_TOKENS) for start in range(0, len(hidden_ND), CHUNK_TOKENS))
    ]  # fmt: skip
    return targets.spread(torch.cat(parts))


def _kl(hidden_ND: Tensor, head_VD: Tensor, ref_hidden_ND: Tensor, ref_head_VD: Tensor) -> Tensor:
    logp_NV = F.log_softmax(widen(F.linear(hidden_ND, head_VD)), dim=-1)
    ref_logp_NV = F.log_softmax(widen(F.linear(ref_hidden_ND, ref_head_VD)), dim=-1)
    return (ref_logp_NV.exp() * (ref_logp_NV - logp_NV)).sum(dim=-1)


def last_token(attention_mask_BT: Tensor) -> Tensor:
    """True on the last token of each row. Rows are right-padded."""
    return attention_mask_BT & ~F.pad(attention_mask_BT[:, 1:], (0, 1))


def at_last(hidden_BTD: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """The hidden state of the last real token of each row (B, D)."""
    last_B = attention_mask_BT.shape[1] - 1 - attention_mask_BT.long().flip(-1).argmax(-1)
    return hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """Log-probs of tokens from packed rows, of a policy or of a reference.

    `active` is entered around a computation with its backward pass.
    """

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
        predicted = targets(attention_mask_BT, only_BT, self.device)
        return self.backbone.hidden(tokens_BT, attention_mask_BT, predicted.read_BT), predicted

    def logprobs(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, only_BT: Tensor, *, temperature: float = 1.0
    ) -> Tensor:
        """`logp_BT` of the tokens in `only_BT` in float32, 0 elsewhere, on the device of the model."""
        tokens_BT = send(tokens_BT, self.device)

        def compute() -> Tensor:
            hidden_ND, predicted = self.hidden(tokens_BT, attention_mask_BT, only_BT)
            return token_logprobs(
                self.head(), hidden_ND, tokens_BT, predicted, temperature=temperature, compiled=self.compiled
            )

        return self.backbone.computing(compute)

    def logprobs_and_entropy(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, only_BT: Tensor, *, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`logprobs`, and the entropy of the distribution that each of these tokens was drawn from."""
        tokens_BT = send(tokens_BT, self.device)

        def compute() -> tuple[Tensor, Tensor]:
            hidden_ND, predicted = self.hidden(tokens_BT, attention_mask_BT, only_BT)
            return logprobs_and_entropy(
                self.head(), hidden_ND, tokens_BT, predicted, temperature=temperature, compiled=self.compiled
            )

        return self.backbone.computing(compute)


def language_model(model: PreTrainedModel, *, compiled: bool = False) -> LanguageModel:
    """A whole model; with adapters, the one that is active now is a part of it."""
    return LanguageModel(backbone=backbone_of(model), head=output_head(model), compiled=compiled)


def base_language_model(model: PreTrainedModel) -> LanguageModel:
    """The same without its adapters."""
    return LanguageModel(backbone=base_backbone_of(model), head=output_head(model))
