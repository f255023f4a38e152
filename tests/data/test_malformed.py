"""Malformed data files: the cases are data in `malformed.py`, each one a test here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from malformed import CASES, attempt


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 75


@pytest.mark.parametrize("name", CASES)
def test_malformed_file_is_answered(name: str) -> None:
    assert attempt(name) is None
