"""What a source may need to know besides its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    folder: Path
    """Where relative paths start: the folder of the recipe."""
    seed: int
    """Of the run."""
