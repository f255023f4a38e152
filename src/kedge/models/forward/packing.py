"""Packing: rows of unequal length end to end instead of padded. Which tokens are computed, and whose outputs are read.

Decoders are causal, so a row can end at the last position that is read, and its last layer begin at the first one.
Shape letters: B rows, T token positions, N tokens of packed rows, M of them in the tails that the last layer is
computed at, R of them whose hidden state is read, S sequences (one a row).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The boundaries of packed sequences."""

    ends_S1: Tensor
    """int32: 0, then the end of each sequence (their cumulative lengths)."""
    longest: int
    is_even: bool
    """True where all sequences have the same length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows are packed into one; every row keeps at least its first token, even if nothing of it is read."""

    shape: tuple[int, int]
    """(B, T) of the padded rows."""
    lengths: tuple[int, ...]
    """Tokens of each row that are computed."""
    place_N: Tensor
    """The index of each token in the flattened (B, T)."""
    position_N: Tensor
    """Its position in its row."""
    rows: Spans
    tail_M: Tensor
    """Indices into the N tokens: those from the first to the last one that is read of each row."""
    tails: Spans
    read_of_rows: Tensor | None
    """Indices into the N tokens: those that are read; None for all."""
    read_of_tails: Tensor | None
    """Indices into the M tokens: those that are read; None for all, as with answers without gaps."""


def lay_out(read_BT: Tensor) -> Layout:
    """The layout for reading hidden states where `read_BT` is True, on its device.

    >>> layout = lay_out(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]).bool())
    >>> layout.lengths, layout.position_N.tolist(), layout.tail_M.tolist(), layout.read_of_tails
    ((3, 4), [0, 1, 2, 0, 1, 2, 3], [1, 2, 6], None)
    """
    read = read_BT.cpu().numpy()  # one wait for the device, and numpy starts no threads for so little
    width = read.shape[1]
    first = read.argmax(axis=1)
    length = np.where(read.any(axis=1), width - read[:, ::-1].argmax(axis=1), 1)
    position = _counted(length)
    place = position + np.repeat(np.arange(len(read)) * width, length)
    tail = _counted(length - first) + np.repeat(length.cumsum() - length + first, length - first)
    is_read = read.reshape(-1)[place]
    to = partial(_on, read_BT.device)
    return Layout(
        shape=(len(read), width),
        lengths=tuple(length.tolist()),
        place_N=to(place),
        position_N=to(position),
        rows=_spans(length, to),
        tail_M=to(tail),
        tails=_spans(length - first, to),
        read_of_rows=_where(is_read, to),
        read_of_tails=_where(is_read[tail], to),
    )


def _counted(length_S: Numbers) -> Numbers:
    """0, 1, … up to each length.

    >>> _counted(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(length_S.sum()) - np.repeat(length_S.cumsum() - length_S, length_S)


def _spans(length_S: Numbers, to: Callable[[Numbers], Tensor]) -> Spans:
    ends_S1 = np.concatenate(([0], length_S.cumsum())).astype(np.int32)
    longest = int(length_S.max())
    return Spans(ends_S1=to(ends_S1), longest=longest, is_even=bool((length_S == longest).all()))


def _where(mask_N: Numbers, to: Callable[[Numbers], Tensor]) -> Tensor | None:
    return None if mask_N.all() else to(mask_N.nonzero()[0])


def _on(device: torch.device, numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers).to(device)
