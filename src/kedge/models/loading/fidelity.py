"""How far an exported model is from its source: log-probabilities of the same tokens, side by side.

Shape letters: T positions that are predicted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Over all positions of a few texts, in nats a token."""

    tokens: int
    mean_change: float
    """Mean of |Δ log p| of the texts' own tokens."""
    kl: float
    """Mean KL from the source to the other."""
    same_top: float
    """Share of the positions with the same likeliest token."""


@torch.no_grad()
def next_token_logprobs(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each text's tokens but the first, the log-probabilities of all tokens, logp_TV, in float32 on the CPU."""
    forward: Any = cast(Any, model)
    rows = [torch.tensor([list(text)], device=model.device) for text in texts if len(text) > 1]
    return [forward(row).logits[0, :-1].float().log_softmax(-1).cpu() for row in rows]


def unequal_weights(source: PreTrainedModel, other: PreTrainedModel) -> list[str]:
    """Names of weights that are not the same to the last bit, or that only one of two models has."""
    left, right = dict(source.named_parameters()), dict(other.named_parameters())
    return [name for name in left | right if name not in left or name not in right or not left[name].equal(right[name])]


def compare(source: Sequence[Tensor], other: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> Fidelity:
    """Both as `next_token_logprobs` gives them for `texts`; vocabularies may differ in rows that no text has."""
    target_T = torch.cat([torch.tensor(text[1:]) for text in texts if len(text) > 1])
    width = min(source[0].shape[1], other[0].shape[1])
    source_TV, other_TV = (torch.cat([part_TV[:, :width] for part_TV in parts]) for parts in (source, other))
    change_T = (source_TV - other_TV).gather(1, target_T[:, None]).abs()
    kl_T = (source_TV.exp() * (source_TV - other_TV)).sum(-1)
    is_same_T = source_TV.argmax(-1) == other_TV.argmax(-1)
    return Fidelity(
        tokens=len(target_T),
        mean_change=float(change_T.mean()),
        kl=float(kl_T.mean()),
        same_top=float(is_same_T.float().mean()),
    )
