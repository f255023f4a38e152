"""Text into tokens whose places in the text are known, and the fast way to do that with much text.

A byte-level BPE tokenizer cuts text into words before it looks for tokens, and never joins tokens over such a cut. Text
is cut here at places that are certain to be among its cuts, before a single space between two signs, and the tokens of
each piece are asked of the tokenizer once. Tokenizers of which this is not certain read the whole text.
The tokenizers library spends most of its time on finding the words: on English text this is about ten times as fast.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from kedge.core.files import hash_json
from kedge.data.tokenizer import (
    BackendEncode,
    Span,
    backend_encoder,
    backend_state,
    special_ids,
    tokens_with_spans,
    word_starts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIGN = "[!-~\u00a1-\u024f\u0370-\u04ff\u2010-\u2027\u2030-\u205e\u4e00-\u9fff]"
"""Signs that nobody takes for space."""
_CUT = re.compile(rf" (?<={_SIGN} )(?={_SIGN})")
"""The space that a piece begins with: a single one between two signs. No pattern of a byte-level tokenizer matches over
the place before it, and none looks over it either."""
_MOST_WORDS = 120_000
"""Pieces of a generation that are remembered; one that was not met in the last two is forgotten. About 40 MB each."""
_LONGEST_WORD = 64
"""Characters of a piece that may come again; longer ones are not remembered."""
_HARMLESS_NORMALISERS = {"NFC", "NFD", "NFKC", "NFKD", "Sequence"}
"""They change no sign of ASCII, and join nothing to a space."""
_PROBES = (
    "It is, as they say: a test. Isn't it? I'd say so; you'll see! We've e.g. 1,234.5 of 42 (x.y) things.",
    "<b>Tabs\tand  two spaces .\n\nNew lines, \r\n and ... dots. Yes!! No?! a.b,c;d:e!f?g 'quoted' \"text\" end.",
    "Na\u00efve caf\u00e9s \u2014 \u201cquotes\u201d, e\u0301, \u4f60\u597d, \U0001f642 yes. f(x): x+1; CamelCase",
)


class TokenisedText(Protocol):
    """The tokens of a text; each begins at one of its characters, and several may share one."""

    @property
    def tokens(self) -> list[int]: ...

    def mask(self, spans: Sequence[Span]) -> list[bool]:
        """True for the tokens that begin inside one of these parts of the text, which are in order."""
        ...

    def places(self, ids: Collection[int]) -> list[Span]:
        """The characters of each token that is one of `ids`, in order."""
        ...


@dataclass(frozen=True, slots=True)
class WholeText:
    """As the tokenizer itself says it."""

    tokens: list[int]
    spans: list[Span]

    def mask(self, spans: Sequence[Span]) -> list[bool]:
        return [any(start <= at < end for start, end in spans) for at, _ in self.spans]

    def places(self, ids: Collection[int]) -> list[Span]:
        return [span for token, span in zip(self.tokens, self.spans, strict=True) if token in ids]


class Piece(NamedTuple):
    """The tokens of a piece of text, where in it each of them begins and ends, and its length."""

    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    length: int


class PiecedText:
    """Put together from pieces; places are looked up piece by piece, since few of them are asked for."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        tokens_of_pieces = [piece.tokens for piece in pieces]
        self._tokens: list[int] = list(chain.from_iterable(tokens_of_pieces))
        self._chars = list(accumulate([piece.length for piece in pieces], initial=0))
        self._counts = list(accumulate(map(len, tokens_of_pieces), initial=0))

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def mask(self, spans: Sequence[Span]) -> list[bool]:
        mask = [False] * len(self._tokens)
        for start, end in spans:
            first, after = self._num_before(start), self._num_before(end)
            mask[first:after] = [True] * (after - first)
        return mask

    def places(self, ids: Collection[int]) -> list[Span]:
        return [self._span(index) for index, token in enumerate(self._tokens) if token in ids]

    def _num_before(self, char: int) -> int:
        """How many tokens begin before this character."""
        at = bisect_right(self._chars, char) - 1
        if at >= len(self._pieces):
            return len(self._tokens)
        return self._counts[at] + bisect_left(self._pieces[at].starts, char - self._chars[at])

    def _span(self, index: int) -> Span:
        at = bisect_right(self._counts, index) - 1
        piece, own, offset = self._pieces[at], index - self._counts[at], self._chars[at]
        return offset + piece.starts[own], offset + piece.ends[own]


class TextTokenizer:
    """Tokenises text; one that is `for_many` texts does it fast. Pickled without what it remembers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, for_many: bool = False) -> None:
        is_cutting = for_many and can_be_cut(tokenizer)
        self.__setstate__(
            {
                "tokenizer": tokenizer,
                "control": special_ids(tokenizer),
                "is_for_many": for_many,
                "is_cutting": is_cutting,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "control": self.control,
            "is_for_many": self.is_for_many,
            "is_cutting": self._encode is not None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tokenizer: PreTrainedTokenizerBase = state["tokenizer"]
        self.control: frozenset[int] = state["control"]
        self._encode = backend_encoder(self.tokenizer) if state["is_cutting"] else None
        self.is_for_many: bool = state["is_for_many"]
        self.memory: dict[Any, Any] = {}
        """For what a template does with every conversation alike."""
        self._words: dict[str, Piece] = {}
        self._older: dict[str, Piece] = {}

    def __call__(self, text: str) -> TokenisedText:
        if self._encode is None:
            return WholeText(*tokens_with_spans(self.tokenizer, text))
        # A piece has its space in front, but for the first, which is marked so that it is not taken for another.
        first, *rest = cast("list[str]", _CUT.split(text))
        words = [f"\0{first}", *rest]
        pieces = list(map(self._words.get, words))
        if None in pieces:
            self._fill(pieces, words, self._encode)
        return PiecedText(cast("list[Piece]", pieces))

    def _fill(self, pieces: list[Piece | None], words: list[str], encode: BackendEncode) -> None:
        """Put in the pieces of words that are not remembered from this generation."""
        if len(self._words) > _MOST_WORDS:
            self._older, self._words = self._words, {}
        places = [place for place, piece in enumerate(pieces) if piece is None]
        fresh = {word: self._older.get(word) for word in dict.fromkeys(words[place] for place in places)}
        unknown = [word for word, piece in fresh.items() if piece is None]
        texts = [word[1:] if word[:1] == "\0" else f" {word}" for word in unknown]
        for word, text, (ids, spans) in zip(unknown, texts, encode(texts), strict=True):
            starts, ends = tuple(start for start, _ in spans), tuple(end for _, end in spans)
            fresh[word] = Piece(tuple(ids), starts, ends, len(text))
        for place in places:
            pieces[place] = fresh[words[place]]
        self._words.update(
            (word, piece) for word, piece in fresh.items() if piece is not None and len(word) <= _LONGEST_WORD
        )


def can_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokens of a text are those of its pieces: a byte-level BPE tokenizer whose words end at the cuts."""
    state = backend_state(tokenizer)
    key = hash_json(state)
    if key not in _verdicts:
        _verdicts[key] = _can_be_cut(tokenizer, state)
    return _verdicts[key]


_verdicts: dict[str, bool] = {}
"""By the hash of how a tokenizer works: to find out takes a second with a large vocabulary."""


def _can_be_cut(tokenizer: PreTrainedTokenizerBase, state: dict[str, Any] | None) -> bool:
    if state is None or state["model"]["type"] != "BPE" or state["model"].get("dropout"):
        return False
    if "ByteLevel" not in _types(state["pre_tokenizer"]) or _types(state["normalizer"]) - _HARMLESS_NORMALISERS:
        return False
    if any(_is_cut_through(token) for token in state["added_tokens"]):
        return False
    return _words_end_at_cuts(tokenizer) and all(_is_same(tokenizer, probe) for probe in _PROBES)


def _types(part: dict[str, Any] | None) -> set[str]:
    """The types of a part of the tokenizer and of the parts that it is a sequence of."""
    if part is None:
        return set()
    inner: list[dict[str, Any]] = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part["type"])}.union(*(_types(step) for step in inner))


def _is_cut_through(token: dict[str, Any]) -> bool:
    """Whether a cut could go through this added token, or through the spaces that it swallows beside it."""
    text = str(token["content"])
    is_greedy = any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word"))
    return is_greedy or _CUT.search(text) is not None


def _words_end_at_cuts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Every sign of ASCII is tried on both sides of a cut: a word must begin there."""
    signs = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    cases = [
        *((f"q{left}", f" {right}z") for left in signs for right in "aZ5.(\"<'"),
        *((f"q{left}", f" {right}z") for left in "aZ5.)\">'" for right in signs),
    ]
    return all(len(left) in word_starts(tokenizer, left + right) for left, right in cases)


def _is_same(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    tokens: list[int] = []
    spans: list[Span] = []
    at = 0
    for number, word in enumerate(cast("list[str]", _CUT.split(text))):
        piece = f" {word}" if number else word
        own_tokens, own_spans = tokens_with_spans(tokenizer, piece)
        tokens += own_tokens
        spans += [(at + start, at + end) for start, end in own_spans]
        at += len(piece)
    return (tokens, spans) == tokens_with_spans(tokenizer, text)
