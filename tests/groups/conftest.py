"""What stages read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import stages


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    stages.write_inputs(folder)
    return folder
