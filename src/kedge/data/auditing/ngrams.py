"""Overlap with evaluation files by word 13-grams, as GPT-3 and Llama were decontaminated.

Runs stay inside one prompt or one answer. A prompt under 13 words is compared as a whole; a shorter answer is not
compared at all, since "Yes." proves nothing. Runs in more than 10 evaluation prompts are boilerplate and ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.data.auditing.shingles import U64, TokenRows, WordHashes
from kedge.data.auditing.text_matching import words

GRAM = 13
BOILERPLATE_PROMPTS = 10

_BATCH_TOKENS = 1 << 17
_FILTER_BITS = 23

Rows = NDArray[np.int64]


class GramRows:
    """13-gram hashes of texts, each with the number of its owner, batch by batch."""

    def __init__(self) -> None:
        self._word = WordHashes()
        self._pending = TokenRows(GRAM)
        self._owners = array("q")

    def add(self, owner: int, prompt: str, answers: Iterable[str]) -> None:
        self._pending.add(map(self._word.__getitem__, words(prompt)))
        self._owners.append(owner)
        for answer in answers:
            answer_words = words(answer)
            if len(answer_words) >= GRAM:
                self._pending.add(map(self._word.__getitem__, answer_words))
                self._owners.append(owner)

    @property
    def is_full(self) -> bool:
        return self._pending.token_count >= _BATCH_TOKENS

    def take(self) -> tuple[U64, Rows]:
        """Hashes and, beside each, its owner. Empties the batch."""
        if not len(self._pending):
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        hashes, starts = self._pending.take()
        owners = np.asarray(self._owners, dtype=np.int64)
        self._owners = array("q")
        return hashes, np.repeat(owners, np.diff(starts, append=len(hashes)))


class GramCollector:
    """The 13-grams of evaluation prompts; owners are numbered on from file to file."""

    def __init__(self) -> None:
        self._pending = GramRows()
        self._batches = list[tuple[U64, Rows]]()
        self.first_owner = 0

    def add(self, owner: int, prompt: str, answers: Iterable[str]) -> None:
        self._pending.add(self.first_owner + owner, prompt, answers)
        if self._pending.is_full:
            self._batches.append(_distinct(*self._pending.take()))

    def index(self) -> EvaluationGrams:
        return index_grams([*self._batches, _distinct(*self._pending.take())])


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationGrams:
    """The 13-grams of all evaluation prompts and answers. `owners[i]` are the prompts that `grams[at[i]]` occurs in."""

    grams: U64
    at: Rows
    owners: Rows
    boilerplate_count: int
    may_hold: NDArray[np.bool_]

    def find(self, hashes: U64) -> tuple[Rows, Rows]:
        """Positions in `hashes` that occur here, and which gram each is."""
        # One byte looked up rules out nearly all, and spares the binary search over millions.
        maybe = np.flatnonzero(self.may_hold[hashes >> np.uint64(64 - _FILTER_BITS)])
        places = np.searchsorted(self.grams, hashes[maybe])
        is_here = places < len(self.grams)
        is_here[is_here] = self.grams[places[is_here]] == hashes[maybe][is_here]
        return maybe[is_here], places[is_here]

    def prompts_with(self, is_hit: NDArray[np.bool_]) -> Rows:
        """The evaluation prompts that any of the marked grams belongs to."""
        return np.unique(self.owners[is_hit[self.at]])


def index_grams(batches: Sequence[tuple[U64, Rows]]) -> EvaluationGrams:
    """Gather the (hashes, prompt numbers) of the evaluation files."""
    all_hashes, all_owners = zip(*batches, strict=True)
    hashes, owners = _distinct(np.concatenate(all_hashes), np.concatenate(all_owners))
    grams, at, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    is_specific = counts <= BOILERPLATE_PROMPTS
    grams, keep = grams[is_specific], is_specific[at]
    may_hold = np.zeros(1 << _FILTER_BITS, dtype=bool)
    may_hold[grams >> np.uint64(64 - _FILTER_BITS)] = True
    return EvaluationGrams(
        grams=grams,
        at=(np.cumsum(is_specific) - 1)[at[keep]],
        owners=owners[keep],
        boilerplate_count=int((~is_specific).sum()),
        may_hold=may_hold,
    )


def _distinct(hashes: U64, owners: Rows) -> tuple[U64, Rows]:
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    is_first = np.ones(len(hashes), dtype=bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    return hashes[is_first], owners[is_first]


class Overlap:
    """Which items of a training file share a 13-gram with the evaluation files."""

    def __init__(self, evaluation: EvaluationGrams) -> None:
        self._evaluation = evaluation
        self._pending = GramRows()
        self._items = list[Rows]()
        self.is_hit = np.zeros(len(evaluation.grams), dtype=bool)

    def add(self, item: int, prompt: str, answers: Iterable[str]) -> None:
        self._pending.add(item, prompt, answers)
        if self._pending.is_full:
            self._flush()

    def items(self) -> Rows:
        """The items with any overlap, in order."""
        self._flush()
        return np.unique(np.concatenate(self._items)) if self._items else np.empty(0, dtype=np.int64)

    def _flush(self) -> None:
        hashes, owners = self._pending.take()
        positions, grams = self._evaluation.find(hashes)
        self.is_hit[grams] = True
        if len(positions):
            self._items.append(np.unique(owners[positions]))
