"""Real servers on loopback with tiny models, and a client that knows their token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests

from running import Served, served

from kedge.commands.serve import Service, Serving, open_service
from kedge.models.loading.tiny import make_tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=5, hidden=32)


@pytest.fixture(scope="session")
def service(model_folder: Path) -> Service:
    return open_service(Serving(model=str(model_folder), device="cpu", dtype="float32"), say=print)


@pytest.fixture(scope="session")
def server(service: Service) -> Iterator[Served]:
    with served(service) as running:
        yield running
