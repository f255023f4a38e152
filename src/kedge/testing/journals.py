"""The journals of a run, as a test reads them: compared with those of another run, and waited for while it goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def records(journal: Path) -> list[dict[str, Any]]:
    """Without what a clock gave them; none where there is no journal."""
    found = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    return [{name: value for name, value in one.items() if not _is_timed(name)} for one in found]


def wait_for(journal: Path, count: int, *, having: bytes = b"\n", seconds: float = 120.0) -> None:
    """Until `having` stands in the journal so many times: by default, until it has so many lines."""
    until = time.monotonic() + seconds
    while (journal.read_bytes() if journal.exists() else b"").count(having) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{journal} does not grow: {count} were expected within {seconds:g} s")
        time.sleep(0.0005)


def _is_timed(name: str) -> bool:
    """
    >>> [_is_timed(name) for name in ("at", "time/step", "tokens/per_second", "attempts")]
    [True, True, True, False]
    """
    return name in ("at", "tokens/per_second") or name.startswith("time/")
