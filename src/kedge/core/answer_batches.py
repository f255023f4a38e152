"""What preference losses read: answers that were judged, laid out in rows, with what the reference thinks of them.

Shape letters: B rows, T token positions, S answers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kedge.core.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch:
    """Answers in order: chosen, rejected, chosen, rejected, … of pairs, or single answers that people liked or not.

    `segment_BT` is 0 at padding and s + 1 on the tokens of answer s; `counted_BT` is True on the answer's own tokens.
    """

    tokens_BT: Tensor
    segment_BT: Tensor
    counted_BT: Tensor
    ref_logp_S: Tensor
    """Sum of the reference's log-probs over each answer; 0 for methods without a reference."""
    is_good_S: Tensor
    """bool: True on chosen and liked answers."""
    good_share: float
    """Share of good answers in the whole optimiser step, not in this part of it."""
    anchor: Tensor
    """KTO's reference point of the whole step, a scalar; 0 for every other method."""
    is_packed: bool
    """Whether a row may hold several answers; if not, each row is one answer from its first position on."""

    def __post_init__(self) -> None:
        if not self.tokens_BT.shape == self.segment_BT.shape == self.counted_BT.shape:
            shapes = [tuple(x.shape) for x in (self.tokens_BT, self.segment_BT, self.counted_BT)]
            raise ShapeError(f"AnswerBatch: tokens, segments and counted must have one shape, found {shapes}")
        if self.ref_logp_S.shape != self.is_good_S.shape:
            shapes = [tuple(x.shape) for x in (self.ref_logp_S, self.is_good_S)]
            raise ShapeError(f"AnswerBatch: one reference log-prob and one label an answer, found {shapes}")

    @property
    def num_answers(self) -> int:
        return len(self.is_good_S)

    def to(self, device: torch.device) -> AnswerBatch:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in found.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)
