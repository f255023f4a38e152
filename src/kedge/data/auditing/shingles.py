"""Runs of tokens as 64-bit hashes, for many texts at once: the sets that MinHash and the 13-grams compare.

Words are hashed one by one (with a cache), runs of them by one vectorised polynomial over the whole batch. All
arithmetic is modulo 2^64, so results do not depend on machine, batch size or order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing modulo 2^64
_CACHED_WORDS = 1 << 18  # about 30 MB; the frequent words of a corpus come early


class WordHashes(dict[bytes, int]):
    """Word to 64-bit hash, remembering the first 2^18 words."""

    def __missing__(self, word: bytes) -> int:
        value = xxh3_64_intdigest(word)
        if len(self) < _CACHED_WORDS:
            self[word] = value
        return value


class TokenRows:
    """A batch of token rows, each at least `width` long: shorter ones are padded, and so compared as a whole."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._tokens = array("Q")
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Iterable[int]) -> None:
        start = len(self._tokens)
        self._tokens.extend(tokens)
        missing = self.width - (len(self._tokens) - start)
        if missing > 0:
            self._tokens.extend([0] * missing)
        self._ends.append(len(self._tokens))

    def take(self) -> tuple[U64, NDArray[np.int64]]:
        """Hashes of all runs of `width` tokens, row after row, and where each row starts among them. Empties the batch.

        >>> rows = TokenRows(2)
        >>> rows.add([5, 6, 7]); rows.add([9])
        >>> hashes, starts = rows.take()
        >>> len(hashes), starts.tolist()
        (3, [0, 2])
        """
        tokens = np.asarray(self._tokens, dtype=np.uint64)
        ends = np.asarray(self._ends, dtype=np.int64)
        self._tokens, self._ends = array("Q"), array("q")
        hashes = tokens[: len(tokens) - self.width + 1].copy() if len(ends) else tokens.copy()
        for offset in range(1, self.width):
            hashes *= _BASE
            hashes += tokens[offset : offset + len(hashes)]
        return _within_rows(hashes, ends, self.width)


def _within_rows(hashes: U64, ends: NDArray[np.int64], width: int) -> tuple[U64, NDArray[np.int64]]:
    """Drop the runs that begin in one row and end in the next."""
    is_inside = np.ones(len(hashes), dtype=bool)
    across = (ends[:-1, None] - np.arange(1, width)).ravel()
    is_inside[across] = False
    sizes = np.diff(ends, prepend=0) - (width - 1)
    return hashes[is_inside], np.cumsum(sizes) - sizes


def fold32(hashes: U64) -> U32:
    """32 well-mixed bits of each hash: folded, then the MurmurHash3 finaliser."""
    folded = (hashes ^ (hashes >> np.uint64(32))).astype(np.uint32)
    folded ^= folded >> np.uint32(16)
    folded *= np.uint32(0x85EBCA6B)
    folded ^= folded >> np.uint32(13)
    folded *= np.uint32(0xC2B2AE35)
    folded ^= folded >> np.uint32(16)
    return folded
