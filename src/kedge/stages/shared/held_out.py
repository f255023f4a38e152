"""Preferences for training and preferences for evaluation: no prompt is in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kedge.core.errors import DataError
from kedge.data.splitting import assign


class HasPromptKey(Protocol):
    @property
    def prompt_key(self) -> int:
        """Equal for equal prompts."""
        ...


ItemT = TypeVar("ItemT", bound=HasPromptKey)


def hold_out(items: Sequence[ItemT], *, share: float, seed: int) -> tuple[list[ItemT], list[ItemT]]:
    """Training and held-out items; this share of the prompts is held out, with all of their items."""
    keys = set(assign([item.prompt_key for item in items], share, seed).tolist())
    return [item for item in items if item.prompt_key not in keys], [item for item in items if item.prompt_key in keys]


def refuse_shared_prompts(data: Sequence[HasPromptKey], held_out: Sequence[HasPromptKey]) -> None:
    """Held-out items whose prompts are trained on measure memory: they are an error, not a number."""
    if shared := {item.prompt_key for item in data} & {item.prompt_key for item in held_out}:
        raise DataError(f"`heldout` shares {len(shared)} prompt(s) with `data`: split them with kedge data split")
