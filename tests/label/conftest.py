"""Stores to test: SQLite always, PostgreSQL under its mark; and the modules beside the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from clusters import Cluster, start_cluster
from made_up import Clock

from kedge.label.database import Store, open_store

SHM = Path("/dev/shm")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A PostgreSQL of our own, thrown away at the end."""
    with start_cluster() as running:
        if running is None:
            pytest.skip("PostgreSQL's programs are not installed (Debian: apt-get install postgresql)")
        yield running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "postgres":
        yield request.getfixturevalue("cluster").new_database()
        return
    # In memory where there is such a folder: every commit is flushed to disk, and tests need no disk.
    with TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        yield str(Path(folder) / "labels.db")


@pytest.fixture
def opened(address: str, clock: Clock) -> Iterator[Callable[[], Store]]:
    """Opens the same store, as often as asked."""
    stores: list[Store] = []

    def open_again() -> Store:
        stores.append(open_store(address, create=True, now=clock, randomness=Random(7)))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[[], Store]) -> Store:
    return opened()
