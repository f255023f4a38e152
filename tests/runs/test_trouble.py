"""Trouble with disks, clocks and altered files: one clear message each."""

from __future__ import annotations

import pytest
from trouble import CASES, attempt

SLOW = ("a limit of file sizes, met by a model", "a removed line", "lines in another order", "an emptied journal")
"""A run or two each; the other cases go the same ways."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_one_clear_message(case: str) -> None:
    assert attempt(case) is None
