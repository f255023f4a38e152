"""Shares of processes, and how many passes each makes where weights are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kedge.core.world import ALONE, Alone, passes_of, replicated, share


@dataclass
class _World:
    rank: int
    size: int
    mesh: Any

    def mine(self, parts: Any) -> Any:
        return share(parts, self.rank, self.size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 10])
def test_with_sharded_weights_every_process_makes_as_many_passes_and_every_part_counts_once(
    count: int, size: int
) -> None:
    parts = [f"part {number}" for number in range(count)]
    passes: list[Any] = [passes_of(_World(rank, size, "mesh"), parts) for rank in range(size)]  # pyright: ignore
    assert len({len(own) for own in passes}) == 1
    assert sorted(part for own in passes for part, counts in own if counts) == parts
    plain: list[Any] = [passes_of(_World(rank, size, None), parts) for rank in range(size)]  # pyright: ignore
    assert plain == [[(part, True) for part in share(parts, rank, size)] for rank in range(size)]


def test_models_that_do_not_learn_are_whole_in_a_world_that_shards() -> None:
    assert replicated(ALONE) is ALONE
    world = replicated(Alone("mesh"))
    assert (world.mesh, world.size, world.gather(3)) == (None, 1, [3])
