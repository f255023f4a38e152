"""Answers that several processes sample together: each its share of the rows, and all get all of them.

What is sampled for a row depends on the seed, its group and its answer index alone (`kedge.core.records.Prompts`), so
the answers are those of a single process.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor

from kedge.core.protocols import Generator
from kedge.core.records import Prompts, Rollouts, joined, to_device
from kedge.core.world import World, together


class SharedGenerator:
    """A generator of this process among those of `world`. Neighbours, such as the answers to one prompt, are sampled by
    one process as far as that goes."""

    def __init__(self, generator: Generator, world: World, *, pad: int, device: torch.device) -> None:
        """`pad` fills up the rows of processes whose answers are shorter; rollouts are on `device`."""
        self._generator, self._world, self._pad, self._device = generator, world, pad, device

    def generate(self, prompts: Prompts, seed: int) -> Rollouts:
        """An answer for every row, in the order of the rows, on all processes."""
        if self._world.size == 1:
            return self._generator.submit(prompts, seed).result()
        start, end = (
            len(prompts.tokens) * rank // self._world.size for rank in (self._world.rank, self._world.rank + 1)
        )

        def sample() -> Rollouts | None:
            if start == end:  # more processes than rows
                return None
            return to_device(self._generator.submit(_part(prompts, start, end), seed).result(), "cpu")

        shares = [share for share in together(self._world, sample) if share is not None]
        return to_device(joined(shares, pad_token=self._pad), self._device)

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        """`generate` as a future, which is done when this returns: processes meet in the order of the calls."""
        future = Future[Rollouts]()
        future.set_result(self.generate(prompts, seed))
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._generator.load_weights(weights, version)


def _part(prompts: Prompts, start: int, end: int) -> Prompts:
    return replace(
        prompts,
        tokens=prompts.tokens[start:end],
        group=prompts.group[start:end],
        answer=prompts.answer[start:end],
    )
