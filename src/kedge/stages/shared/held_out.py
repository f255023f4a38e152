"""Preferences for training and preferences for evaluation: no prompt is in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar, overload

import numpy as np

from kedge.core.errors import DataError
from kedge.data.encoding.store import LazyRows
from kedge.data.splitting import Keys, assign

PROMPT_KEY: Final = "prompt_key"
"""The column of tables that has the keys of the prompts."""


class HasPromptKey(Protocol):
    @property
    def prompt_key(self) -> int:
        """Equal for equal prompts."""
        ...


ItemT = TypeVar("ItemT", bound=HasPromptKey)


@overload
def hold_out(items: LazyRows[ItemT], *, share: float, seed: int) -> tuple[LazyRows[ItemT], LazyRows[ItemT]]: ...
@overload
def hold_out(items: Sequence[ItemT], *, share: float, seed: int) -> tuple[Sequence[ItemT], Sequence[ItemT]]: ...
def hold_out(items: Sequence[ItemT], *, share: float, seed: int) -> tuple[Sequence[ItemT], Sequence[ItemT]]:
    """Training and held-out items; this share of the prompts is held out, with all of their items."""
    keys = prompt_keys(items)
    is_held_out = np.isin(keys, assign(keys, share, seed))
    if isinstance(items, LazyRows):
        return items.take(~is_held_out), items.take(is_held_out)
    return (
        [item for item, is_out in zip(items, is_held_out, strict=True) if not is_out],
        [item for item, is_out in zip(items, is_held_out, strict=True) if is_out],
    )


def prompt_keys(items: Sequence[HasPromptKey]) -> Keys:
    """The key of each item's prompt, without a look at the rest of it where that can be."""
    if isinstance(items, LazyRows):
        return items.column(PROMPT_KEY)
    return np.asarray([item.prompt_key for item in items], dtype=np.uint64)


def refuse_shared_prompts(data: Sequence[HasPromptKey], held_out: Sequence[HasPromptKey]) -> None:
    """Held-out items whose prompts are trained on measure memory: they are an error, not a number."""
    if num_shared := len(np.intersect1d(prompt_keys(data), prompt_keys(held_out))):
        raise DataError(f"`heldout` shares {num_shared} prompt(s) with `data`: split them with kedge data split")
