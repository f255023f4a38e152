"""Rows of unlike length laid end to end instead of padded: which tokens are computed, where they stand, what is read.

Decoders are causal, so a row ends at the last position that is read, and its last layer begins at the first one.
Shape letters: B rows, T token positions, N tokens laid end to end, M of them in the tails that the last layer is
computed at, R of them that are read, S sequences (one a row).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Sequences that lie end to end."""

    ends_S1: Tensor
    """int32: 0, then where each of them ends."""
    longest: int
    is_even: bool
    """All of them are as long as the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rows as one; every row keeps at least its first token, whether or not something is read of it."""

    shape: tuple[int, int]
    """(B, T) of the rows where they are padded."""
    lengths: tuple[int, ...]
    """Of the rows, in their order."""
    place_N: Tensor
    """Where each token stands in the flattened (B, T)."""
    position_N: Tensor
    """Where it stands in its row."""
    rows: Spans
    tail_M: Tensor
    """Which of the N tokens lie between the first and the last that are read of their row."""
    tails: Spans
    read_of_rows: Tensor | None
    """Which of the N tokens are read; None: all."""
    read_of_tails: Tensor | None
    """Which of the M tokens are read; None: all, which is so for answers in one piece."""


def lay_out(read_BT: Tensor) -> Layout:
    """The layout for reading where `read_BT` is True, on its device.

    >>> found = lay_out(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]).bool())
    >>> found.lengths, found.position_N.tolist(), found.tail_M.tolist(), found.read_of_tails
    ((3, 4), [0, 1, 2, 0, 1, 2, 3], [1, 2, 6], None)
    """
    device = read_BT.device
    read_BT = read_BT.cpu()  # all that depends on how many there are is found here: the host waits for the device once
    width = read_BT.shape[1]
    index_T, is_read_B = torch.arange(width), read_BT.any(dim=1)
    first_B = read_BT.byte().argmax(dim=1)
    last_B = torch.where(is_read_B, width - 1 - read_BT.flip(1).byte().argmax(dim=1), 0)
    place_N = (index_T <= last_B[:, None]).flatten().nonzero()[:, 0]
    tail_M = ((index_T >= first_B[:, None]) & (index_T <= last_B[:, None])).flatten()[place_N].nonzero()[:, 0]
    is_read_N = read_BT.flatten()[place_N]
    return Layout(
        shape=(len(read_BT), width),
        lengths=tuple((last_B + 1).tolist()),
        place_N=place_N.to(device),
        position_N=(place_N % width).to(device),
        rows=_spans(last_B + 1, device),
        tail_M=tail_M.to(device),
        tails=_spans(last_B + 1 - first_B, device),
        read_of_rows=_where(is_read_N, device),
        read_of_tails=_where(is_read_N[tail_M], device),
    )


def _spans(length_S: Tensor, device: torch.device) -> Spans:
    ends_S1 = pad(length_S.cumsum(0), (1, 0)).int()
    longest = int(length_S.max())
    return Spans(ends_S1=ends_S1.to(device), longest=longest, is_even=bool((length_S == longest).all()))


def _where(mask_N: Tensor, device: torch.device) -> Tensor | None:
    return None if mask_N.all() else mask_N.nonzero()[:, 0].to(device)
