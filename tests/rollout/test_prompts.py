"""Prompts and sampling settings: what is accepted, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from kedge.core.errors import DataError
from kedge.rollout.prompts import Prompts, repeated
from kedge.rollout.settings import SamplingSettings


def test_answers_to_a_prompt_are_neighbours_and_counted() -> None:
    found = repeated([[9], [3, 4]], ids=[7, 2], answers=3)
    assert found.tokens == ((9,), (9,), (9,), (3, 4), (3, 4), (3, 4))
    assert found.group == (7, 7, 7, 2, 2, 2)
    assert found.answer == (0, 1, 2, 0, 1, 2)


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


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"max_new_tokens": 0}, {"stop": [""]}, {"top": 1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings.model_validate(wrong)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValidationError, match="min_new_tokens 5 is above max_new_tokens 4"):
        SamplingSettings(min_new_tokens=5, max_new_tokens=4)


def test_settings_and_prompts_do_without_torch() -> None:
    code = "import sys, kedge.rollout.settings, kedge.rollout.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
