"""Files for the tests of `kedge.data`, written into a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

WriteLines = Callable[[str, Iterable[Any]], Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Write values as JSON Lines; bytes and text go in as they are."""

    def write(name: str, values: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_line(value) + b"\n" for value in values))
        return path

    return write


def _line(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()
