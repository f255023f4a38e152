"""Judged answers in, batches out: one answer a row, or several; answers that are judged together stay together.

Shape letters: B rows, T token positions, S answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kedge.core.answer_batches import AnswerBatch
from kedge.data.batching import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers that are learnt from together: the chosen and the rejected one of a pair, or one that stands alone."""

    sequences: tuple[TokenSequence, ...]
    is_good: tuple[bool, ...]
    ref_logp: tuple[float, ...]

    @property
    def longest(self) -> int:
        return max(len(one.tokens) for one in self.sequences)


def answer_batches(items: Sequence[Answers], *, rows: int, pad: int, width: int | None) -> list[AnswerBatch]:
    """At most `rows` items a batch, longest first so that neighbours are alike; all of them are one optimiser step.

    With a `width`, the answers of a batch share rows of so many tokens (first fit); without one, each has its own.
    """
    by_length = sorted(items, key=lambda one: -one.longest)
    good = [is_good for one in items for is_good in one.is_good]
    share = sum(good) / max(len(good), 1)
    return [_lay_out(by_length[i : i + rows], pad, width, share) for i in range(0, len(by_length), rows)]


def _lay_out(items: Sequence[Answers], pad: int, width: int | None, good_share: float) -> AnswerBatch:
    sequences = [one for item in items for one in item.sequences]
    rows = [[index] for index in range(len(sequences))] if width is None else _first_fit(sequences, width)
    longest = max(sum(len(sequences[index].tokens) for index in row) for row in rows)
    tokens_BT = torch.full((len(rows), longest), pad, dtype=torch.long)
    segment_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    counted_BT = torch.zeros((len(rows), longest), dtype=torch.bool)
    for b, row in enumerate(rows):
        at = 0
        for index in row:
            end = at + len(sequences[index].tokens)
            tokens_BT[b, at:end] = torch.tensor(sequences[index].tokens)
            segment_BT[b, at:end] = index + 1
            counted_BT[b, at:end] = torch.tensor(sequences[index].counted)
            counted_BT[b, at] = False  # nothing precedes it, so nothing predicts it
            at = end
    return AnswerBatch(
        tokens_BT=tokens_BT,
        segment_BT=segment_BT,
        counted_BT=counted_BT,
        ref_logp_S=torch.tensor([value for item in items for value in item.ref_logp]),
        is_good_S=torch.tensor([value for item in items for value in item.is_good]),
        good_share=good_share,
        anchor=torch.zeros(()),
        is_packed=width is not None,
    )


def _first_fit(sequences: Sequence[TokenSequence], width: int) -> list[list[int]]:
    """Rows of indices, longest first; a sequence longer than `width` has a row of its own length."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda at: -len(sequences[at].tokens)):
        size = len(sequences[index].tokens)
        spot = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if spot == len(rows):
            rows.append([])
            room.append(max(width, size))
        rows[spot].append(index)
        room[spot] -= size
    return rows
