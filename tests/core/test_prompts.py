"""Prompts for a generator: what is accepted, and what is refused with which words."""

from __future__ import annotations

import pytest

from kedge.core.errors import DataError
from kedge.core.records import Prompts, repeated


def test_answers_to_a_prompt_are_neighbours_and_counted() -> None:
    prompts = repeated([[9], [3, 4]], ids=[7, 2], answers=3)
    assert prompts.tokens == ((9,), (9,), (9,), (3, 4), (3, 4), (3, 4))
    assert prompts.group == (7, 7, 7, 2, 2, 2)
    assert prompts.answer == (0, 1, 2, 0, 1, 2)


def test_rows_that_would_be_the_same_answer_are_refused() -> None:
    with pytest.raises(DataError, match="2 rows ask for answer 0 of group 7"):
        Prompts(tokens=((1,), (2,), (3,)), group=(7, 8, 7), answer=(0, 0, 0))


def test_a_row_without_tokens_is_named() -> None:
    with pytest.raises(DataError, match=r"row 1 \(group 5\) has no tokens"):
        Prompts(tokens=((1,), ()), group=(4, 5), answer=(0, 0))


@pytest.mark.parametrize(("prompts", "ids"), [([[1], [2]], [4]), ([], [])])
def test_rows_and_ids_must_match(prompts: list[list[int]], ids: list[int]) -> None:
    with pytest.raises(DataError, match=f"found {len(prompts)} of tokens, {len(ids)} of group"):
        repeated(prompts, ids, 1)
