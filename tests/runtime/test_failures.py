"""Two processes of which one fails: all end, the user reads why, and the run goes on from where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import crew
import pytest
from failures import CASES, SHARDED, STOPPING, Case, attempt, members, metrics, resumed_equals, write_recipe

ALIKE = ("raises", "is killed")
"""Cases that others stand for: an error that all save for, and the kill of a whole command (test_together)."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.name in ALIKE else (), id=case.name) for case in CASES]
)
def test_a_process_that(case: Case) -> None:
    assert attempt(case) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
def test_a_process_with_a_part_of_the_weights_that(case: Case) -> None:
    assert attempt(case) is None


@pytest.mark.slow
def test_a_run_goes_on_with_plain_and_with_sharded_weights(tmp_path: Path) -> None:
    """One process that shards, stopped on the way; then two that shard; then one that does not."""
    home, shard = tmp_path, ["--set", "placement.weights=shard"]
    write_recipe(home, "pass")
    (first,) = members(home, 1, *shard, "--set", "stages.ppo.iterations=3")
    ended = crew.run([replace(first, before=STOPPING)], home)
    assert ended.codes == [130], ended
    stopped = crew.run([replace(member, before=STOPPING) for member in members(home, 2, "--resume", *shard)], home)
    assert stopped.codes == [130, 130], stopped
    assert [line["step"] for line in metrics(home)] == [1, 2]
    assert resumed_equals(home, 1) is None
