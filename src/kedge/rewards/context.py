"""What a reward source is given besides its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def unheard(code: str, words: str) -> None:
    """Takes what nobody listens to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    folder: Path
    """The folder of the recipe: relative paths start here."""
    seed: int
    """The seed of the run."""
    note: Callable[[str, str], None] = unheard
    """Takes what a source has to say at its start: the code of an event, and its words."""
    fields: frozenset[str] | None = None
    """The fields that records of prompts have, `solution` where it is known; None before the prompts are known."""
    calls: Path | None = None
    """The folder in which is written down what calls that cost money were replied; None keeps nothing of them."""
    share: float = 1.0
    """Of a budget, what this process may spend: where several score, each has its part."""
