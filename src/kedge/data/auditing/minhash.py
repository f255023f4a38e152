"""Texts as sets of shingles: MinHash signatures to find candidates by, and the sets themselves to be sure.

Shingles are runs of 5 words; texts under 20 words (and scripts without spaces) use runs of 5 characters instead, so
a short text never counts as near to a long one. Both lie in unnamed temporary files: about 700 bytes a prompt.
"""

from __future__ import annotations

import tempfile
import weakref
from array import array
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kedge.data.auditing.shingles import U32, TokenRows, WordHashes, fold32
from kedge.data.auditing.text_matching import words

PERMUTATIONS = 120  # divisible by 3, 4, 5, 6, 8, 10 and 12, the rows a band may have
SHINGLE = 5
SHORT_WORDS = 20

_BATCH_TOKENS = 1 << 17
_CHUNK_PAIRS = 1 << 12

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketched:
    """Text i has the signature `signatures[i]` and the shingles `shingles[offsets[i] : offsets[i + 1]]`."""

    signatures: U32
    shingles: U32
    offsets: Rows

    def __len__(self) -> int:
        return len(self.signatures)


class Sketches:
    """Signatures and shingles of texts, collected one by one."""

    def __init__(self, *, seed: int) -> None:
        self._a, self._b = permutations(seed)
        self._word = WordHashes()
        self._pending = TokenRows(SHINGLE)
        self._signatures, self._shingles = self._file(), self._file()
        self._offsets = array("q", [0])

    def _file(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(prefix="kedge-minhash-")  # noqa: SIM115 (lives as long as the sketches)
        weakref.finalize(self, file.close)
        return file

    def add(self, text: str) -> None:
        text_words = words(text)
        if len(text_words) < SHORT_WORDS:
            self._pending.add(map(ord, " ".join(text.casefold().split())))
        else:
            self._pending.add(map(self._word.__getitem__, text_words))
        if self._pending.token_count >= _BATCH_TOKENS:
            self._flush()

    def sketched(self) -> Sketched:
        """All that was added, mapped from the files."""
        self._flush()
        offsets = np.asarray(self._offsets)
        return Sketched(
            signatures=_mapped(self._signatures, (len(offsets) - 1) * PERMUTATIONS).reshape(-1, PERMUTATIONS),
            shingles=_mapped(self._shingles, int(offsets[-1])),
            offsets=offsets,
        )

    def _flush(self) -> None:
        if len(self._pending):
            hashes, starts = self._pending.take()
            folded = fold32(hashes)
            self._signatures.write(signatures(folded, starts, self._a, self._b).tobytes())
            self._shingles.write(folded.tobytes())
            self._offsets.extend((np.append(starts[1:], len(folded)) + self._offsets[-1]).tolist())


def permutations(seed: int) -> tuple[U32, U32]:
    """Factors a and shifts b of the maps h -> a h + b modulo 2^32; an odd factor makes a map one to one.

    The numbers are those of NumPy's legacy generator, which never changes: signatures are the same in every version.
    """
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    halves = generator.randint(0, 1 << 31, PERMUTATIONS, dtype=np.uint32)
    shifts = generator.randint(0, 1 << 32, PERMUTATIONS, dtype=np.uint32)
    return halves * np.uint32(2) + np.uint32(1), shifts


def _mapped(file: IO[bytes], size: int) -> U32:
    file.flush()
    return np.memmap(file, dtype=np.uint32, mode="r", shape=(size,)) if size else np.empty(0, dtype=np.uint32)


def signatures(hashes: U32, starts: Rows, a: U32, b: U32) -> U32:
    """The smallest of `a * hash + b` modulo 2^32 over each row's hashes, for every permutation (a, b)."""
    permuted = np.empty_like(hashes)
    result = np.empty((len(starts), len(a)), dtype=np.uint32)
    for index in range(len(a)):
        np.multiply(hashes, a[index], out=permuted)
        np.add(permuted, b[index], out=permuted)
        result[:, index] = np.minimum.reduceat(permuted, starts)
    return result


def jaccard(left: Sketched, left_rows: Rows, right: Sketched, right_rows: Rows) -> NDArray[np.float64]:
    """Shared shingles over all shingles, pair by pair; repeats within a text count once."""
    result = np.empty(len(left_rows), dtype=np.float64)
    for start in range(0, len(left_rows), _CHUNK_PAIRS):
        part = slice(start, start + _CHUNK_PAIRS)
        ours, theirs = _tagged(left, left_rows[part]), _tagged(right, right_rows[part])
        shared = np.intersect1d(ours, theirs, assume_unique=True)
        size = len(left_rows[part])
        num_ours, num_theirs, num_shared = (
            np.bincount(tagged >> np.uint64(32), minlength=size) for tagged in (ours, theirs, shared)
        )
        result[part] = num_shared / (num_ours + num_theirs - num_shared)
    return result


def _tagged(sketched: Sketched, rows: Rows) -> NDArray[np.uint64]:
    """The distinct shingles of each row, with the position of the row in the upper half."""
    starts, sizes = sketched.offsets[rows], sketched.offsets[rows + 1] - sketched.offsets[rows]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shingles = sketched.shingles[np.repeat(starts, sizes) + within].astype(np.uint64)
    return np.unique(shingles | (np.repeat(np.arange(len(rows), dtype=np.uint64), sizes) << np.uint64(32)))
