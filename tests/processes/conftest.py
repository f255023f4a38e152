"""Three processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(3) as started:
        yield started
