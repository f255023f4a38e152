"""What a reward source is given besides its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    folder: Path
    """The folder of the recipe: relative paths start here."""
    seed: int
    """The seed of the run."""
    fields: frozenset[str] | None = None
    """The fields that records of prompts have, `solution` where it is known; None before the prompts are known."""
