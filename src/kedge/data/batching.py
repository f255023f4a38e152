"""Token sequences in, batches of one sequence a row out, in an order that a seed and a step number fix.

A step is cut into passes longest first, by items or by tokens; that never changes which sequences are in it.
Shape letters: B rows, T token positions, C comparisons, K answers in a comparison, S labelled answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kedge.core.batches import AnswerBatch, Batch, Comparisons, pad_rows, pad_tokens
from kedge.core.records import cut
from kedge.core.seeds import item_at
from kedge.data.encoding.store import LazyRows, lazy_map


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """One sequence, and which of its tokens count in the loss."""

    tokens: Sequence[int]
    counted: Sequence[bool]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedAnswers:
    """Token sequences that were ranked against each other, as `kedge.core.batches.Comparisons` reads them."""

    answers: Sequence[Sequence[int]]
    rank: Sequence[int]
    margin: float = 0.0
    certainty: float = 1.0
    weight: float = 1.0
    objective: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswers:
    """Answers that are learnt from together: the chosen and the rejected one of a pair, or one that stands alone."""

    sequences: tuple[TokenSequence, ...]
    is_good: tuple[bool, ...]
    ref_logp: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


def num_steps(items: int, *, epochs: float, batch: int, max_steps: int | None = None) -> int:
    """Optimiser steps in `epochs` passes, `max_steps` at most; a last step that is not full counts.

    >>> num_steps(100, epochs=1.5, batch=32), num_steps(100, epochs=1.5, batch=32, max_steps=3)
    (5, 3)
    """
    steps = math.ceil(_num_visits(items, epochs) / batch)
    return steps if max_steps is None else min(steps, max_steps)


def step_rows(
    items: int, *, epochs: float, batch: int, seed: int, start: int = 0, max_steps: int | None = None
) -> Iterator[list[int]]:
    """The items of each optimiser step from step `start` on: a new permutation every epoch, cut every `batch`.

    >>> [sorted(rows) for rows in step_rows(4, epochs=1, batch=4, seed=0)]
    [[0, 1, 2, 3]]
    """
    total = _num_visits(items, epochs)
    end = num_steps(items, epochs=epochs, batch=batch, max_steps=max_steps) * batch
    for first in range(start * batch, min(end, total), batch):
        yield [item_at(index, items, seed) for index in range(first, min(first + batch, total))]


def token_batch(sequences: Sequence[TokenSequence], *, pad: int) -> Batch:
    """One sequence a row, in their order."""
    tokens_BT, attention_mask_BT = pad_tokens([sequence.tokens for sequence in sequences], pad=pad)
    return Batch(tokens_BT=tokens_BT, attention_mask_BT=attention_mask_BT, counted_BT=_counted(sequences))


def comparison_batch(items: Sequence[RankedAnswers], *, pad: int) -> Comparisons:
    """One answer a row, in the order of their comparisons."""
    tokens_BT, attention_mask_BT = pad_tokens([answer for item in items for answer in item.answers], pad=pad)
    starts = accumulate((len(item.answers) for item in items), initial=0)
    return Comparisons(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_mask_BT,
        row_CK=pad_rows([range(at, at + len(item.answers)) for at, item in zip(starts, items, strict=False)], 0),
        rank_CK=pad_rows([item.rank for item in items], 0),
        margin_C=torch.tensor([item.margin for item in items]),
        certainty_C=torch.tensor([item.certainty for item in items]),
        weight_C=torch.tensor([item.weight for item in items]),
        objective_C=torch.tensor([item.objective for item in items]),
    )


def answer_batch(
    items: Sequence[LabelledAnswers], *, pad: int, good_share: float, anchor: Tensor | None = None
) -> AnswerBatch:
    """One answer a row, in the order of their items; `good_share` and KTO's `anchor` are of the whole step."""
    sequences = [sequence for item in items for sequence in item.sequences]
    tokens_BT, attention_mask_BT = pad_tokens([sequence.tokens for sequence in sequences], pad=pad)
    return AnswerBatch(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_mask_BT,
        counted_BT=_counted(sequences),
        ref_logp_S=torch.tensor([logp for item in items for logp in item.ref_logp]),
        is_good_S=torch.tensor([is_good for item in items for is_good in item.is_good]),
        good_share=good_share,
        anchor=torch.zeros(()) if anchor is None else anchor,
    )


def good_share(items: Sequence[LabelledAnswers]) -> float:
    """The share of good answers among all answers of a step."""
    labels = [is_good for item in items for is_good in item.is_good]
    return sum(labels) / max(len(labels), 1)


class _HasTokens(Protocol):
    @property
    def num_tokens(self) -> int: ...


ItemT = TypeVar("ItemT", bound=_HasTokens)
BatchT = TypeVar("BatchT")


def _batches(
    items: Sequence[ItemT],
    batch: Callable[[Sequence[ItemT]], BatchT],
    *,
    rows: int | None,
    tokens: int | None,
    shares: int,
) -> LazyRows[BatchT]:
    """`batch` of the items of each pass, made when it is asked for: of a large set only one is in memory at a time."""
    lengths = [item.num_tokens for item in items]
    parts = cut(range(len(items)), length=lengths.__getitem__, rows=rows, tokens=tokens, shares=shares)
    return lazy_map(lambda part: batch([items[row] for row in part]), parts)


def padded_batches(
    sequences: Sequence[TokenSequence], *, rows: int | None = None, tokens: int | None = None, shares: int = 1, pad: int
) -> LazyRows[Batch]:
    """The passes of a step: at most `rows` sequences each, or `tokens` of their tokens, longest first; none larger than
    one of `shares` of the step."""
    return _batches(sequences, partial(token_batch, pad=pad), rows=rows, tokens=tokens, shares=shares)


def comparison_batches(
    items: Sequence[RankedAnswers], *, rows: int | None = None, tokens: int | None = None, shares: int = 1, pad: int
) -> LazyRows[Comparisons]:
    """The passes of a step: at most `rows` comparisons each, or `tokens` of their answers, longest first; none larger
    than one of `shares` of the step."""
    return _batches(items, partial(comparison_batch, pad=pad), rows=rows, tokens=tokens, shares=shares)


def answer_batches(
    items: Sequence[LabelledAnswers],
    *,
    rows: int | None = None,
    tokens: int | None = None,
    shares: int = 1,
    pad: int,
    anchor: Tensor | None = None,
) -> LazyRows[AnswerBatch]:
    """The passes of a step: at most `rows` items each, or `tokens` of their answers, longest first; none larger than
    one of `shares` of the step."""
    batch = partial(answer_batch, pad=pad, good_share=good_share(items), anchor=anchor)
    return _batches(items, batch, rows=rows, tokens=tokens, shares=shares)


def _counted(sequences: Sequence[TokenSequence]) -> Tensor:
    # Nothing precedes the first token of a sequence, so nothing predicts it.
    return pad_rows([[False, *sequence.counted[1:]] for sequence in sequences], False)


def _num_visits(items: int, epochs: float) -> int:
    """How many items are learnt from, repeats counted; a share of an epoch that rounds to nothing is one item."""
    return max(round(items * epochs), min(items, 1))
