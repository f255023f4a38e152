"""A record of many rows as micro-batches of few: neighbours of like length together, each cut to its longest row.

What comes back is put in the order and the shape of the whole. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from kedge.core.records import Experience, Rollouts, ValueTargets, take, trimmed

RecordT = TypeVar("RecordT", Rollouts, Experience, ValueTargets)


def micro_batches(record: RecordT, rows: int) -> list[RecordT]:
    """At most `rows` rows each; which rows share one changes speed and memory, never the sum of their losses."""
    return [part for _, part in _parts(record, rows)]


def each(rollouts: Rollouts, rows: int, ask: Callable[[Rollouts], Tensor]) -> Tensor:
    """`ask` of every micro-batch, as one (B, T) tensor in the order of `rollouts`; 0 where nobody was asked."""
    answer_BT = torch.zeros(rollouts.tokens_BT.shape, dtype=torch.float32, device=rollouts.tokens_BT.device)
    for index_R, part in _parts(rollouts, rows):
        found_RT = ask(part)
        answer_BT[index_R, : found_RT.shape[1]] = found_RT.float()
    return answer_BT


def _parts(record: RecordT, rows: int) -> Iterator[tuple[Tensor, RecordT]]:
    rollouts = record if isinstance(record, Rollouts) else record.rollouts
    length_B = rollouts.attention_mask_BT.sum(dim=1)
    order_B = length_B.argsort(descending=True, stable=True)
    longest = length_B[order_B].tolist()
    for at in range(0, len(longest), rows):
        index_R = order_B[at : at + rows]
        yield index_R, trimmed(take(record, index_R), longest[at])
