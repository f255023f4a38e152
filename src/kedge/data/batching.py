"""Token sequences in, padded or packed batches out, in an order that a seed and a step number fix.

Packing is a way of laying out one optimiser step; it never changes which sequences are in it.
Shape letters: B rows, T token positions, C comparisons, K answers in a comparison, S labelled answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

import torch

from kedge.core.batches import AnswerBatch, Batch, Comparisons, pad_rows, pad_tokens
from kedge.core.seeds import item_at

Item = TypeVar("Item")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswers:
    """Answers that are learnt from together: the chosen and the rejected one of a pair, or one that stands alone."""

    sequences: tuple[TokenSequence, ...]
    is_good: tuple[bool, ...]
    ref_logp: tuple[float, ...]


def num_steps(items: int, *, epochs: float, batch: int) -> int:
    """Optimiser steps in `epochs` passes; a last step that is not full counts.

    >>> num_steps(100, epochs=1.5, batch=32)
    5
    """
    return math.ceil(_num_visits(items, epochs) / batch)


def step_rows(items: int, *, epochs: float, batch: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """The items of each optimiser step from step `start` on: a new permutation every epoch, cut every `batch`.

    >>> [sorted(rows) for rows in step_rows(4, epochs=1, batch=4, seed=0)]
    [[0, 1, 2, 3]]
    """
    total = _num_visits(items, epochs)
    for first in range(start * batch, total, batch):
        yield [item_at(index, items, seed) for index in range(first, min(first + batch, total))]


def longest_first(items: Sequence[Item], rows: int, *, length: Callable[[Item], int]) -> list[Sequence[Item]]:
    """Items in batches of at most `rows`, the longest first: those of a batch are alike and need little padding.

    >>> longest_first(["bb", "a", "dddd", "ccc"], 2, length=len)
    [['dddd', 'ccc'], ['bb', 'a']]
    """
    by_length = sorted(items, key=lambda item: -length(item))
    return [by_length[start : start + rows] for start in range(0, len(by_length), rows)]


def padded_batches(sequences: Sequence[TokenSequence], *, rows: int, pad: int) -> list[Batch]:
    """One sequence a row, longest first, at most `rows` rows a batch."""
    batches = longest_first(sequences, rows, length=_num_tokens)
    return [_lay_out([[(1, sequence)] for sequence in batch], pad) for batch in batches]


def packed_batches(sequences: Sequence[TokenSequence], *, rows: int, width: int, pad: int) -> list[Batch]:
    """Several sequences a row of at most `width` tokens (first fit, longest first), at most `rows` rows a batch."""
    packed = [
        [(number, sequences[index]) for number, index in enumerate(row, start=1)]
        for row in _first_fit(sequences, width)
    ]
    return [_lay_out(packed[start : start + rows], pad) for start in range(0, len(packed), rows)]


def comparison_batches(items: Sequence[RankedAnswers], *, rows: int, pad: int) -> list[Comparisons]:
    """At most `rows` comparisons a batch, longest first."""
    batches = longest_first(items, rows, length=lambda item: max(map(len, item.answers)))
    return [_lay_out_comparisons(batch, pad) for batch in batches]


def answer_batches(items: Sequence[LabelledAnswers], *, rows: int, pad: int, width: int | None) -> list[AnswerBatch]:
    """At most `rows` items a batch, longest first; all of them together are one optimiser step.

    With a `width`, the answers of a batch share rows of so many tokens (first fit); without one, each has its own.
    """
    batches = longest_first(items, rows, length=lambda item: max(map(_num_tokens, item.sequences)))
    labels = [is_good for item in items for is_good in item.is_good]
    good_share = sum(labels) / max(len(labels), 1)
    return [_lay_out_answers(batch, pad, width, good_share) for batch in batches]


def _lay_out(rows: Sequence[Sequence[tuple[int, TokenSequence]]], pad: int) -> Batch:
    """Rows of sequences, each with the number that `segment_BT` has on its tokens."""
    return Batch(
        tokens_BT=pad_rows([_joined(sequence.tokens for _, sequence in row) for row in rows], pad),
        segment_BT=pad_rows([_joined([number] * _num_tokens(sequence) for number, sequence in row) for row in rows], 0),
        # Nothing precedes the first token of a sequence, so nothing predicts it.
        counted_BT=pad_rows([_joined([False, *sequence.counted[1:]] for _, sequence in row) for row in rows], False),
    )


def _lay_out_comparisons(items: Sequence[RankedAnswers], pad: int) -> Comparisons:
    tokens_BT, attention_mask_BT = pad_tokens([answer for item in items for answer in item.answers], pad=pad)
    starts = accumulate((len(item.answers) for item in items), initial=0)
    return Comparisons(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_mask_BT,
        row_CK=pad_rows([range(at, at + len(item.answers)) for at, item in zip(starts, items, strict=False)], 0),
        rank_CK=pad_rows([item.rank for item in items], 0),
        margin_C=torch.tensor([item.margin for item in items]),
        weight_C=torch.tensor([item.weight for item in items]),
        objective_C=torch.tensor([item.objective for item in items]),
    )


def _lay_out_answers(items: Sequence[LabelledAnswers], pad: int, width: int | None, good_share: float) -> AnswerBatch:
    sequences = [sequence for item in items for sequence in item.sequences]
    rows = [[index] for index in range(len(sequences))] if width is None else _first_fit(sequences, width)
    batch = _lay_out([[(index + 1, sequences[index]) for index in row] for row in rows], pad)
    return AnswerBatch(
        tokens_BT=batch.tokens_BT,
        segment_BT=batch.segment_BT,
        counted_BT=batch.counted_BT,
        ref_logp_S=torch.tensor([logp for item in items for logp in item.ref_logp]),
        is_good_S=torch.tensor([is_good for item in items for is_good in item.is_good]),
        good_share=good_share,
        anchor=torch.zeros(()),
        is_packed=width is not None,
    )


def _first_fit(sequences: Sequence[TokenSequence], width: int) -> list[list[int]]:
    """Rows of indices, longest first; a sequence longer than `width` has a row of its own length."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda at: -_num_tokens(sequences[at])):
        size = _num_tokens(sequences[index])
        spot = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if spot == len(rows):
            rows.append([])
            room.append(max(width, size))
        rows[spot].append(index)
        room[spot] -= size
    return rows


def _num_tokens(sequence: TokenSequence) -> int:
    return len(sequence.tokens)


def _joined(parts: Iterator[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def _num_visits(items: int, epochs: float) -> int:
    """How many items are learnt from, repeats counted; a share of an epoch that rounds to nothing is one item."""
    return max(round(items * epochs), min(items, 1))
