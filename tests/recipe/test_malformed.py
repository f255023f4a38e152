"""Every malformed recipe is refused in plain words."""

from __future__ import annotations

import pytest
from malformed_recipes import CASES, Malformed, attempt


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 100


SLOW = ("3,000 levels of lists", "3,000 levels by indents")
"""Mappings of 3,000 levels go the same way."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name[:60], marks=[pytest.mark.slow] if case.name in SLOW else []) for case in CASES],
)
def test_a_malformed_recipe_is_refused_in_plain_words(case: Malformed) -> None:
    assert attempt(case) is None
