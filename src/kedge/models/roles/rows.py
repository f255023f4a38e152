"""A record of many rows as micro-batches of few: longest rows first, each micro-batch trimmed to its longest row.

Results are put back in the order and the shape of the whole record. Shape letters: B sequences, T token positions,
R sequences of a micro-batch.
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
    return [part for _, part in longest_first(record, rows)]


def by_micro_batch(rollouts: Rollouts, rows: int, compute: Callable[[Rollouts], Tensor]) -> Tensor:
    """`compute` on every micro-batch, as one (B, T) tensor in the order of `rollouts`; 0 where rows were trimmed."""
    result_BT = torch.zeros(rollouts.tokens_BT.shape, dtype=torch.float32, device=rollouts.tokens_BT.device)
    for index_R, part in longest_first(rollouts, rows):
        part_RT = compute(part)
        result_BT[index_R, : part_RT.shape[1]] = part_RT.float()
    return result_BT


def longest_first(record: RecordT, rows: int) -> Iterator[tuple[Tensor, RecordT]]:
    """Micro-batches of at most `rows` rows of similar length, each with the indices of its rows in `record`."""
    rollouts = record if isinstance(record, Rollouts) else record.rollouts
    length_B = rollouts.attention_mask_BT.sum(dim=1)
    order_B = length_B.argsort(descending=True, stable=True)
    lengths = length_B[order_B].tolist()
    for start in range(0, len(lengths), rows):
        index_R = order_B[start : start + rows]
        yield index_R, trimmed(take(record, index_R), lengths[start])
