"""Trouble with disks, clocks and altered files: one clear message each."""

from __future__ import annotations

import pytest
from trouble import CASES, attempt


@pytest.mark.parametrize("case", CASES)
def test_one_clear_message(case: str) -> None:
    assert attempt(case) is None
