"""Two processes of which one fails: all end, the user reads why, and the run goes on from where it was."""

from __future__ import annotations

import pytest
from failures import CASES, SHARDED, Case, attempt


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_that(case: Case) -> None:
    assert attempt(case) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
def test_a_process_with_a_part_of_the_weights_that(case: Case) -> None:
    assert attempt(case) is None
