"""Every malformed recipe is refused in plain words."""

from __future__ import annotations

import pytest
from malformed_recipes import CASES, Malformed, attempt


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 100


@pytest.mark.parametrize("case", CASES, ids=[case.name[:60] for case in CASES])
def test_a_malformed_recipe_is_refused_in_plain_words(case: Malformed) -> None:
    assert attempt(case) is None
