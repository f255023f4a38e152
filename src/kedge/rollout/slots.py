"""The state of the rows being decoded: one column of numbers for each slot, on the device of the model.

The host puts rows into slots and reads them after some steps; in between nothing waits for it. A row that ended stands
still until then: it is computed again and again, at the same place, and the tokens it draws are dropped.
Shape letters: R slots, K steps since the host last looked, F numbers a slot, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

State: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""The host's copy of `Slots.state_FR`."""

FIELDS = ("token", "column", "drawn", "key", "place", "alive", "at")
TOKEN, COLUMN, DRAWN, KEY, PLACE, ALIVE, AT = range(len(FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """`state_FR` in the order of FIELDS: the last token and its column, how many tokens the answer has, the row's key,
    its place in the cache, 1 while it grows, and the steps since the last look; then what those steps drew."""

    state_FR: Tensor
    token_KR: Tensor
    logp_KR: Tensor

    @property
    def token_R(self) -> Tensor:
        return self.state_FR[TOKEN]

    @property
    def column_R(self) -> Tensor:
        return self.state_FR[COLUMN]

    @property
    def drawn_R(self) -> Tensor:
        return self.state_FR[DRAWN]

    @property
    def key_R(self) -> Tensor:
        return self.state_FR[KEY]

    @property
    def place_R(self) -> Tensor:
        return self.state_FR[PLACE]

    @property
    def alive_R(self) -> Tensor:
        return self.state_FR[ALIVE]

    @property
    def at_R(self) -> Tensor:
        return self.state_FR[AT]

    def first(self, rows: int) -> Slots:
        """The first slots, over the same memory."""
        return Slots(state_FR=self.state_FR[:, :rows], token_KR=self.token_KR[:, :rows], logp_KR=self.logp_KR[:, :rows])


def empty_slots(rows: int, steps: int, device: torch.device) -> Slots:
    return Slots(
        state_FR=torch.zeros(len(FIELDS), rows, dtype=torch.int64, device=device),
        token_KR=torch.zeros(steps, rows, dtype=torch.int64, device=device),
        logp_KR=torch.zeros(steps, rows, dtype=torch.float32, device=device),
    )


def no_rows(rows: int) -> State:
    """No row in any slot, and each slot at a place of its own.

    >>> no_rows(3)[PLACE].tolist(), no_rows(3)[ALIVE].tolist()
    ([0, 1, 2], [0, 0, 0])
    """
    state_FR = np.zeros((len(FIELDS), rows), dtype=np.int64)
    state_FR[PLACE] = np.arange(rows)
    return state_FR


def advance(slots: Slots, token_R: Tensor, logp_R: Tensor, stop_V: Tensor, *, most: int) -> None:
    """Record the drawn tokens; growing rows take theirs, and end with a stop token or once they have `most` tokens."""
    row_R = torch.arange(len(token_R), device=token_R.device)
    slots.token_KR[slots.at_R, row_R] = token_R
    slots.logp_KR[slots.at_R, row_R] = logp_R
    slots.at_R.add_(1)
    alive_R = slots.alive_R.clone()
    slots.token_R.copy_(torch.where(alive_R.bool(), token_R, slots.token_R))
    slots.column_R.add_(alive_R)
    slots.drawn_R.add_(alive_R)
    ended_R = stop_V[token_R] | (slots.drawn_R >= most)
    slots.alive_R.mul_(~ended_R)
