"""The modules beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from studio_site import StudioSite, make_site


@pytest.fixture
def site(tmp_path: Path) -> StudioSite:
    return make_site(tmp_path / "project")
