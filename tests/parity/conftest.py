"""The command line in child processes that can be killed."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from kedge.testing.commands import Kedge, forking_server


@pytest.fixture(scope="session")
def kedge(tmp_path_factory: pytest.TempPathFactory) -> Generator[Kedge]:
    with forking_server(tmp_path_factory.mktemp("kedge")) as commands:
        yield commands
