"""What the loops on rollouts share: one step a batch, what happens around it, and how a batch is cut for learning.

Left out: where batches come from, what a step does, what is written down, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kedge.core.errors import NumericsError
from kedge.core.protocols import Metrics
from kedge.core.records import Rollouts
from kedge.trainers.evaluated import Judged, Scored

BatchT = TypeVar("BatchT", Rollouts, Scored)
Step = Callable[[BatchT, int], tuple[Judged, Metrics]]
"""One iteration: from a batch and its number to what was said of it and what is written down."""


class Watch(Protocol):
    """What happens around iterations: writing down, saving, stopping."""

    def learnt(self, number: int, judged: Judged, metrics: Metrics) -> None: ...
    def dropped(self, number: int, rollouts: Rollouts, error: NumericsError) -> None: ...


def train(batches: Iterable[BatchT], step: Step[BatchT], watch: Watch, *, start: int = 0) -> None:
    """One iteration for each batch; `start` is the number of the first one."""
    for number, batch in enumerate(batches, start=start):
        try:
            judged, metrics = step(batch, number)
        except NumericsError as error:
            watch.dropped(number, batch.rollouts if isinstance(batch, Scored) else batch, error)
        else:
            watch.learnt(number, judged, metrics)


class Passes(Protocol):
    """Settings that say how often a batch is learnt from."""

    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...


def minibatches(rows: int, cfg: Passes, *, seed: int) -> Iterable[Tensor]:
    """The rows of every optimiser step: a new permutation each pass, cut into parts that differ by at most one."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(cfg.epochs):
        order_B = torch.randperm(rows, generator=rng)
        yield from (part for part in order_B.tensor_split(min(cfg.minibatches, rows)))
