"""Sequences of unequal length in parts that one forward pass can take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def token_chunks(lengths: Sequence[int], *, max_tokens: int) -> Iterator[list[int]]:
    """The indices of sequences of these lengths, longest first, cut where a padded chunk would pass `max_tokens`.

    A sequence that is longer than that has a chunk of its own.

    >>> list(token_chunks([3, 9, 4, 8], max_tokens=18))
    [[1, 3], [2, 0]]
    >>> list(token_chunks([30, 2], max_tokens=18))
    [[0], [1]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        rows = max(1, max_tokens // lengths[order[start]])
        yield order[start : start + rows]
        start += rows
