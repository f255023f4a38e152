"""The journals of a run, for tests that compare two runs, or wait for a run that goes on in another process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def records(journal: Path) -> list[dict[str, Any]]:
    """The records of a journal without times and speeds; none where there is no journal."""
    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [{name: value for name, value in row.items() if not _is_timed(name)} for row in rows]


def wait_for(journal: Path, count: int, *, having: bytes = b"\n", seconds: float = 120.0) -> None:
    """Wait until `having` stands in the journal `count` times: by default, until it has so many lines."""
    deadline = time.monotonic() + seconds
    while (journal.read_bytes() if journal.exists() else b"").count(having) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{journal} does not grow: {count} were expected within {seconds:g} s")
        time.sleep(0.0005)


def _is_timed(name: str) -> bool:
    """
    >>> [_is_timed(name) for name in ("at", "time/step", "tokens/per_second", "attempts")]
    [True, True, True, False]
    """
    return name in ("at", "tokens/per_second") or name.startswith("time/")
