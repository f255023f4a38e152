"""Text into tokens whose places in the text are known, and the fast way to do that with much text.

Many texts are cut into pieces at once (`kedge.data.encoding.cuts`), and the tokenizer is asked once for the tokens of
each piece that was not met before. Tokenizers for whose pieces this is not certain read whole texts. How much faster
that is depends on how often pieces come again: docs/speed.md has the figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kedge.data.encoding.cuts import Cutter, Places, codes_of, cutter_for
from kedge.data.tokenizer import BackendEncode, Span, backend_encoder, special_ids, tokens_with_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]

_MOST_PIECES = 120_000
"""Pieces of a generation that are remembered; one that was not met in the last two is forgotten. About 30 MB each."""
_MOST_TOKENS = 20 * _MOST_PIECES
"""Tokens of a generation, those of pieces that are not remembered among them."""
_LONGEST_PIECE = 64
"""Characters of a piece that may come again; longer ones are not remembered."""
_BETWEEN = "\0"
"""Stands between two texts: no sign, so that none of them looks over its end."""


class TokenisedText(Protocol):
    """The tokens of a text; each begins at one of its characters, and several may share one."""

    @property
    def tokens(self) -> Tokens: ...

    def mask(self, spans: Sequence[Span]) -> Mask:
        """True for the tokens that begin inside one of these parts of the text, which are in order."""
        ...

    def places(self, wanted: Mask) -> list[Span]:
        """The characters of each token whose id is wanted, in order. `wanted` is a table of ids (`id_table`)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class WholeText:
    """As the tokenizer itself says it."""

    tokens: Tokens
    spans: list[Span]

    def mask(self, spans: Sequence[Span]) -> Mask:
        return np.array([any(start <= at < end for start, end in spans) for at, _ in self.spans], dtype=np.bool_)

    def places(self, wanted: Mask) -> list[Span]:
        return [self.spans[index] for index in np.flatnonzero(wanted.take(self.tokens, mode="clip")).tolist()]


class PiecedText:
    """Put together from pieces; what is inside of a piece is asked of the tokenizer, since that is rarely wanted.

    `chars` and `counts` have where each piece begins, in characters of the text and in tokens, and where the last ends.
    """

    def __init__(self, text: str, tokens: Tokens, chars: Places, counts: Places, tokenise: TextTokenizer) -> None:
        self._text = text
        self.tokens = tokens
        self._chars = chars
        self._counts = counts
        self._tokenise = tokenise

    def mask(self, spans: Sequence[Span]) -> Mask:
        mask = np.zeros(len(self.tokens), dtype=np.bool_)
        bounds = np.array(spans, dtype=np.int64).reshape(-1)
        pieces = np.searchsorted(self._chars, bounds, side="right") - 1
        firsts = self._counts[pieces].tolist()
        for at, inside in enumerate((bounds - self._chars[pieces]).tolist()):
            if inside:  # the tokens of the piece that begin before it
                firsts[at] += bisect_left(self._spans(int(pieces[at])), (inside,))
        for first, after in zip(firsts[::2], firsts[1::2], strict=True):
            mask[first:after] = True
        return mask

    def places(self, wanted: Mask) -> list[Span]:
        indices = np.flatnonzero(wanted.take(self.tokens, mode="clip"))
        pieces = np.searchsorted(self._counts, indices, side="right") - 1
        columns = (pieces, indices - self._counts[pieces], self._chars[pieces])
        spans: list[Span] = []
        for piece, inside, begin in zip(*(column.tolist() for column in columns), strict=True):
            start, end = self._spans(piece)[inside]
            spans.append((begin + start, begin + end))
        return spans

    def _spans(self, piece: int) -> list[Span]:
        """The characters of the tokens of a piece, as counted from its own beginning."""
        return self._tokenise.spans(self._text[int(self._chars[piece]) : int(self._chars[piece + 1])])


class _PieceMemory:
    """The tokens of pieces, one after the other; a piece is known by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._num_pieces = self._num_tokens = 0
        self.starts: Places = np.zeros(1024, dtype=np.int64)
        """Where the tokens of a piece begin among all, and with the next number where they end."""
        self.tokens: Tokens = np.zeros(4096, dtype=np.int32)

    @property
    def is_full(self) -> bool:
        return len(self.numbers) > _MOST_PIECES or self._num_tokens > _MOST_TOKENS

    def tokens_of(self, number: int) -> list[int]:
        return self.tokens[self.starts[number] : self.starts[number + 1]].tolist()

    def add(self, pieces: Sequence[str], tokens: Sequence[Sequence[int]]) -> range:
        """Put pieces in and return their numbers; those that will not come again are not remembered by their text."""
        first, start = self._num_pieces, self._num_tokens
        ends = start + np.cumsum([len(row) for row in tokens], dtype=np.int64)
        self._num_pieces, self._num_tokens = first + len(pieces), int(ends[-1])
        self.starts = _with_room(self.starts, self._num_pieces + 1)
        self.starts[first + 1 : self._num_pieces + 1] = ends
        self.tokens = _with_room(self.tokens, self._num_tokens)
        self.tokens[start : self._num_tokens] = list(chain.from_iterable(tokens))
        numbers = range(first, self._num_pieces)
        pairs = zip(pieces, numbers, strict=True)
        self.numbers.update(pair for pair in pairs if len(pair[0]) <= _LONGEST_PIECE)
        return numbers


def _with_room(array: NDArray[Any], size: int) -> NDArray[Any]:
    if size <= len(array):
        return array
    return np.concatenate([array, np.zeros(max(size, 2 * len(array)) - len(array), dtype=array.dtype)])


class TextTokenizer:
    """Tokenises text; one that is `for_many` texts does it fast. Pickled without what it remembers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, for_many: bool = False) -> None:
        self.__setstate__(
            {
                "tokenizer": tokenizer,
                "control": special_ids(tokenizer),
                "is_for_many": for_many,
                "cutter": cutter_for(tokenizer) if for_many else None,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "control": self.control,
            "is_for_many": self.is_for_many,
            "cutter": self._cutter,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tokenizer: PreTrainedTokenizerBase = state["tokenizer"]
        self.control: frozenset[int] = state["control"]
        self.is_control = id_table(self.control)
        self.is_for_many: bool = state["is_for_many"]
        self._cutter: Cutter | None = state["cutter"]
        self._encode: BackendEncode = backend_encoder(self.tokenizer) if self._cutter is not None else _no_encode
        self.memory: dict[Any, Any] = {}
        """For what a template does with every conversation alike."""
        self._pieces, self._older = _PieceMemory(), _PieceMemory()
        self._spans: dict[str, list[Span]] = {}

    def __call__(self, text: str) -> TokenisedText:
        return self.many([text])[0]

    def many(self, texts: Sequence[str]) -> Sequence[TokenisedText]:
        """All texts at once: most of the time goes to looking words up, and they share them."""
        if self._cutter is None:
            return [_whole(self.tokenizer, text) for text in texts]
        if self._pieces.is_full:
            self._older, self._pieces = self._pieces, _PieceMemory()
        joined = _BETWEEN.join(("", *texts, ""))
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        ends = np.cumsum(lengths + 1)
        begins = ends - lengths
        codes = codes_of(joined)
        marks = self._cutter.marks(joined, codes)
        marks[begins] = marks[ends] = True
        bounds = np.flatnonzero(marks)
        tokens, counts = self._tokens_at(_pieces(joined, codes, bounds))
        firsts, lasts = np.searchsorted(bounds, begins).tolist(), np.searchsorted(bounds, ends).tolist()
        return [
            PiecedText(
                text,
                tokens[counts[first] : counts[last]],
                bounds[first : last + 1] - bounds[first],
                counts[first : last + 1] - counts[first],
                self,
            )
            for text, first, last in zip(texts, firsts, lasts, strict=True)
        ]

    def _tokens_at(self, pieces: pa.Array) -> tuple[Tokens, Places]:
        """The tokens of all pieces, and how many are before each piece and after the last."""
        encoded = pieces.dictionary_encode()
        numbers = self._numbers(encoded.dictionary.to_pylist())[encoded.indices.to_numpy(zero_copy_only=False)]
        starts = self._pieces.starts[numbers]
        lengths = self._pieces.starts[numbers + 1] - starts
        counts = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(starts - counts[:-1], lengths) + np.arange(counts[-1])
        return self._pieces.tokens[places], counts

    def _numbers(self, pieces: list[str]) -> Places:
        """The numbers of different pieces; those that are not known are asked for."""
        numbers: list[int | None] = list(map(self._pieces.numbers.get, pieces))
        places = [place for place, number in enumerate(numbers) if number is None]
        if places:
            fresh = [pieces[place] for place in places]
            older = list(map(self._older.numbers.get, fresh))
            unknown = iter(self._encode([piece for piece, number in zip(fresh, older, strict=True) if number is None]))
            rows = [next(unknown) if number is None else self._older.tokens_of(number) for number in older]
            for place, number in zip(places, self._pieces.add(fresh, rows), strict=True):
                numbers[place] = number
        return np.array(numbers, dtype=np.int64)

    def spans(self, piece: str) -> list[Span]:
        """The characters of each token of a piece."""
        if piece not in self._spans:
            if len(self._spans) > _MOST_PIECES // 10:
                self._spans.clear()
            self._spans[piece] = tokens_with_spans(self.tokenizer, piece)[1]
        return self._spans[piece]


def id_table(ids: Iterable[int]) -> Mask:
    """True at these ids; the last place is always False."""
    places = sorted(ids)
    table = np.zeros(max(places, default=-1) + 2, dtype=np.bool_)
    table[places] = True
    return table


def _whole(tokenizer: PreTrainedTokenizerBase, text: str) -> WholeText:
    tokens, spans = tokens_with_spans(tokenizer, text)
    return WholeText(np.array(tokens, dtype=np.int32), spans)


def _no_encode(_: list[str]) -> list[list[int]]:
    raise RuntimeError("this tokenizer reads whole texts")


def _pieces(text: str, codes: NDArray[np.uint32], bounds: Places) -> pa.Array:
    """The pieces of a text as an array of texts that shares its bytes."""
    encoded = text.encode()
    if len(encoded) == len(text):
        offsets = bounds
    else:
        widths = np.ones(len(codes) + 1, dtype=np.int64)
        widths[0] = 0
        for first in (0x80, 0x800, 0x10000):
            widths[1:] += codes >= first
        offsets = np.cumsum(widths)[bounds]
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(encoded)]
    return pa.Array.from_buffers(pa.large_string(), len(bounds) - 1, buffers)
