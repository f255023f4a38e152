"""Who holds which part of a weight, on one machine and on several."""

from __future__ import annotations

import pytest

from kedge.core.errors import ConfigError
from kedge.runtime.processes import mesh_shape


@pytest.mark.parametrize(
    ("machines", "of_machine", "of_all"),
    [("a", (1, 1), (1, 1)), ("aaa", (1, 3), (1, 3)), ("aabb", (2, 2), (1, 4)), ("abc", (3, 1), (1, 3))],
)
def test_a_machine_holds_all_parts_or_all_machines_do(
    machines: str, of_machine: tuple[int, int], of_all: tuple[int, int]
) -> None:
    assert mesh_shape(list(machines), "machine") == of_machine
    assert mesh_shape(list(machines), "all") == of_all


@pytest.mark.parametrize(("machines", "counts"), [("aab", "a: 2, b: 1"), ("abab", "a: 1, b: 1, a: 1, b: 1")])
def test_machines_that_cannot_hold_copies_of_each_other_are_refused(machines: str, counts: str) -> None:
    with pytest.raises(ConfigError, match=f"found {counts}. Start as many on each, or set placement.shard_within: all"):
        mesh_shape(list(machines), "machine")
