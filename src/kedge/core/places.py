"""Where Kedge keeps what it made or was given once, and uses again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$KEDGE_CACHE`, else `kedge` below `$XDG_CACHE_HOME`, else `~/.cache/kedge`."""
    if own := os.environ.get("KEDGE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kedge"
    return Path.home() / ".cache" / "kedge"
