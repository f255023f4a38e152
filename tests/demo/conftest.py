"""A customer's message whose facts the tests know by heart."""

from __future__ import annotations

import pytest


@pytest.fixture
def message() -> str:
    return "Hello. The kettle of order 107 smells of fish. It was a birthday present. May I have a refund?"
