"""What supervised and preference losses read: token rows, alone, compared with each other or labelled; and padding.

A row is one sequence, padded on the right. Batches stay on the host: what a pass computes is laid out from their masks,
and only that goes to the device (`kedge.core.records.send`).
Shape letters: B rows, T token positions, C comparisons, K answers in a comparison, S answers (one a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kedge.core.errors import ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One sequence a row. `counted_BT` is True on the tokens whose loss counts."""

    tokens_BT: Tensor
    attention_mask_BT: Tensor
    counted_BT: Tensor

    def __post_init__(self) -> None:
        _check_rows("Batch", self.tokens_BT, self.attention_mask_BT, self.counted_BT)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask_BT.sum())


TIE = 0.5
"""The certainty of a pair that ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """Answers (one a row, padded on the right) and how they were ranked against each other: a pair is a ranking of two.

    `row_CK` says in which row an answer stands; `rank_CK` is its place, 1 the best, equal numbers tie, 0 absent.
    `margin_C` is how much better the better one should score (0 without a margin), `certainty_C` the probability that
    it is the better one (½ for a pair that ties), `weight_C` how much a comparison counts, `objective_C` which head of
    the reward model it is about. Margins and certainties are of pairs alone.
    """

    tokens_BT: Tensor
    attention_mask_BT: Tensor
    row_CK: Tensor
    rank_CK: Tensor
    margin_C: Tensor
    certainty_C: Tensor
    weight_C: Tensor
    objective_C: Tensor

    def __post_init__(self) -> None:
        if self.tokens_BT.shape != self.attention_mask_BT.shape or self.row_CK.shape != self.rank_CK.shape:
            rows = f"tokens {tuple(self.tokens_BT.shape)}, attention mask {tuple(self.attention_mask_BT.shape)}"
            places = f"rows {tuple(self.row_CK.shape)}, ranks {tuple(self.rank_CK.shape)}"
            raise ShapeError(f"Comparisons: {rows}; {places}: the two of each kind must have one shape")

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask_BT.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBatch:
    """Answers in order: chosen, rejected, chosen, rejected, … of pairs, or single answers that people liked or not.

    Row s is answer s with its prompt; `counted_BT` is True on the answer's own tokens.
    """

    tokens_BT: Tensor
    attention_mask_BT: Tensor
    counted_BT: Tensor
    ref_logp_S: Tensor
    """Sum of the reference's log-probs over each answer; 0 for methods without a reference."""
    is_good_S: Tensor
    """bool: True on chosen and liked answers."""
    good_share: float
    """Share of good answers in the whole optimiser step, not in this part of it."""
    anchor: Tensor
    """KTO's reference point of the whole step, a scalar; 0 for every other method."""

    def __post_init__(self) -> None:
        _check_rows("AnswerBatch", self.tokens_BT, self.attention_mask_BT, self.counted_BT)
        if not len(self.tokens_BT) == len(self.ref_logp_S) == len(self.is_good_S):
            sizes = [len(x) for x in (self.tokens_BT, self.ref_logp_S, self.is_good_S)]
            raise ShapeError(f"AnswerBatch: one row, one reference log-prob and one label an answer, found {sizes}")

    @property
    def num_answers(self) -> int:
        return len(self.is_good_S)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask_BT.sum())


def pad_rows(rows: Sequence[Sequence[int]], fill: int, *, side: Literal["left", "right"] = "right") -> Tensor:
    """Rows of unequal length as one tensor, as wide as the longest; `fill` stands in the places that are left over.

    Rows of bool with a `fill` of bool make a mask.

    >>> pad_rows([[5, 6, 7], [8]], 0).tolist(), pad_rows([[5, 6, 7], [8]], 0, side="left").tolist()
    ([[5, 6, 7], [8, 0, 0]], [[5, 6, 7], [0, 0, 8]])
    """
    width = max(map(len, rows), default=0)
    # numpy reads a list four times as fast as torch does.
    padded_BT = np.full((len(rows), width), fill, dtype=np.bool_ if isinstance(fill, bool) else np.int64)
    for b, row in enumerate(rows):
        start = 0 if side == "right" else width - len(row)
        padded_BT[b, start : start + len(row)] = row
    return torch.from_numpy(padded_BT)


def pad_tokens(
    rows: Sequence[Sequence[int]], *, pad: int, side: Literal["left", "right"] = "right"
) -> tuple[Tensor, Tensor]:
    """Token sequences as `tokens_BT`, padded with the token `pad`, and `attention_mask_BT`, True on their own tokens.

    The mask comes from the lengths: `pad` may also be a token of the sequences.

    >>> tokens_BT, attention_mask_BT = pad_tokens([[5, 6, 9], [9]], pad=9)
    >>> tokens_BT.tolist(), attention_mask_BT.int().tolist()
    ([[5, 6, 9], [9, 9, 9]], [[1, 1, 1], [1, 0, 0]])
    """
    return pad_rows(rows, pad, side=side), pad_rows([[True] * len(row) for row in rows], False, side=side)


def _check_rows(record: str, *tensors: Tensor) -> None:
    if len({x.shape for x in tensors}) > 1:
        shapes = [tuple(x.shape) for x in tensors]
        raise ShapeError(f"{record}: tokens, attention mask and counted must have one shape, found {shapes}")
