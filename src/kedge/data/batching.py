"""Token sequences in, padded or packed batches out, in an order that a seed and a step number fix.

Packing is a way of laying out one optimiser step; it never changes which sequences are in it.
Shape letters: B rows, T token positions, C comparisons, K answers in a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kedge.core.batches import Batch, Comparisons
from kedge.core.seeds import seed_for


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sequence, and which of its tokens count in the loss."""

    tokens: Sequence[int]
    counted: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedAnswers:
    """Token sequences that were ranked against each other, as `kedge.core.batches.Comparisons` reads them."""

    answers: Sequence[Sequence[int]]
    rank: Sequence[int]
    margin: float = 0.0
    weight: float = 1.0
    objective: int = 0


def num_steps(items: int, *, epochs: float, batch: int) -> int:
    """Optimiser steps in `epochs` passes; a last step that is not full counts.

    >>> num_steps(100, epochs=1.5, batch=32)
    5
    """
    return math.ceil(_num_seen(items, epochs) / batch)


def step_rows(items: int, *, epochs: float, batch: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """The items of each optimiser step from step `start` on: a new permutation every epoch, cut every `batch`.

    >>> [sorted(rows) for rows in step_rows(4, epochs=1, batch=4, seed=0)]
    [[0, 1, 2, 3]]
    """
    total = _num_seen(items, epochs)
    for first in range(start * batch, total, batch):
        wanted = range(first, min(first + batch, total))
        yield [item_at(index, items, seed) for index in wanted]


def padded(sequences: Sequence[TokenSequence], *, rows: int, pad: int) -> list[Batch]:
    """One sequence a row, longest first so that neighbours are alike, at most `rows` rows a batch."""
    by_length = sorted(sequences, key=lambda one: -len(one.tokens))
    return [_lay_out([[one] for one in by_length[i : i + rows]], pad) for i in range(0, len(by_length), rows)]


def packed(sequences: Sequence[TokenSequence], *, rows: int, width: int, pad: int) -> list[Batch]:
    """Several sequences a row of at most `width` tokens (first fit, longest first), at most `rows` rows a batch."""
    bins: list[list[TokenSequence]] = []
    room: list[int] = []
    for one in sorted(sequences, key=lambda one: -len(one.tokens)):
        size = len(one.tokens)
        spot = next((index for index, left in enumerate(room) if left >= size), len(bins))
        if spot == len(bins):
            bins.append([])
            room.append(max(width, size))
        bins[spot].append(one)
        room[spot] -= size
    return [_lay_out(bins[i : i + rows], pad) for i in range(0, len(bins), rows)]


def compared(items: Sequence[RankedAnswers], *, rows: int, pad: int) -> list[Comparisons]:
    """At most `rows` comparisons a batch, longest first so that neighbours are alike."""
    by_length = sorted(items, key=lambda one: -max(len(answer) for answer in one.answers))
    return [_lay_out_compared(by_length[i : i + rows], pad) for i in range(0, len(by_length), rows)]


def _lay_out(rows: Sequence[Sequence[TokenSequence]], pad: int) -> Batch:
    width = max(sum(len(one.tokens) for one in row) for row in rows)
    tokens_BT = torch.full((len(rows), width), pad, dtype=torch.long)
    segment_BT = torch.zeros((len(rows), width), dtype=torch.long)
    counted_BT = torch.zeros((len(rows), width), dtype=torch.bool)
    for b, row in enumerate(rows):
        at = 0
        for number, one in enumerate(row, start=1):
            end = at + len(one.tokens)
            tokens_BT[b, at:end] = torch.tensor(one.tokens)
            segment_BT[b, at:end] = number
            counted_BT[b, at:end] = torch.tensor(one.counted)
            # Nothing precedes the first token of a sequence, so nothing predicts it.
            counted_BT[b, at] = False
            at = end
    return Batch(tokens_BT=tokens_BT, segment_BT=segment_BT, counted_BT=counted_BT)


def _lay_out_compared(items: Sequence[RankedAnswers], pad: int) -> Comparisons:
    answers = [answer for one in items for answer in one.answers]
    width, most = max(map(len, answers)), max(len(one.answers) for one in items)
    tokens_BT = torch.full((len(answers), width), pad, dtype=torch.long)
    attention_mask_BT = torch.zeros((len(answers), width), dtype=torch.bool)
    for b, answer in enumerate(answers):
        tokens_BT[b, : len(answer)] = torch.tensor(answer)
        attention_mask_BT[b, : len(answer)] = True
    row_CK = torch.zeros((len(items), most), dtype=torch.long)
    rank_CK = torch.zeros((len(items), most), dtype=torch.long)
    at = 0
    for c, one in enumerate(items):
        row_CK[c, : len(one.answers)] = torch.arange(at, at + len(one.answers))
        rank_CK[c, : len(one.answers)] = torch.tensor(one.rank)
        at += len(one.answers)
    return Comparisons(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_mask_BT,
        row_CK=row_CK,
        rank_CK=rank_CK,
        margin_C=torch.tensor([one.margin for one in items]),
        weight_C=torch.tensor([one.weight for one in items]),
        objective_C=torch.tensor([one.objective for one in items]),
    )


def _num_seen(items: int, epochs: float) -> int:
    """How many items are learnt from; a share of an epoch that rounds to nothing is one item."""
    return max(round(items * epochs), min(items, 1))


def item_at(index: int, items: int, seed: int) -> int:
    epoch, offset = divmod(index, items)
    return int(_permutation(items, seed_for(seed, "order", epoch))[offset])


@lru_cache(maxsize=2)
def _permutation(items: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(items)
