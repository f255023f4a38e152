"""A store in memory, and the modules beside the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from team_site import Clock, TeamSite, make_site, new_store

from kedge.label.database import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    with new_store(clock) as store:
        yield store


@pytest.fixture
def site(store: Store, clock: Clock) -> TeamSite:
    return make_site(store, clock)
