"""A cache of its own for every test, so that none finds what another one made."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
