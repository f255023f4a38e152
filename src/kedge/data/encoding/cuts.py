"""Where text can be cut into pieces whose tokens, one piece after the other, are those of the whole text.

A byte-level BPE tokenizer cuts text into words before it looks for tokens, and never joins tokens over such a cut. Only
places that are certain to be among its cuts are taken: before a single space between two signs, around the tokens that
were added to the vocabulary, and beside new lines where the tokenizer was seen to cut there too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kedge.core.files import hash_json
from kedge.data.tokenizer import Span, backend_state, tokens_with_spans, words_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Places = NDArray[np.int64]
_SIGN_RANGES = ("!~", "\u00a1\u024f", "\u0370\u04ff", "\u2010\u2027", "\u2030\u205e", "\u4e00\u9fff")
"""Signs that nobody takes for space, from the first to the last of each range."""
_SIGNS = "".join(map(chr, range(ord("!"), ord("~") + 1)))
_GAPS = ("\n", "\n\n", "\n\n\n", " \n", "\n \n", "\t\n", "\r\n", "\r\n\r\n", "  \n\n")
"""What may stand between a sign and the beginning of a line."""
_LINE_OPENINGS = ascii_letters + digits + "-*#"
"""Signs that many lines begin with."""
_CLOSERS = ".,;:!?)"
_SPACE, _NEW_LINE = ord(" "), ord("\n")
_HARMLESS_NORMALISERS = {"NFC", "NFD", "NFKC", "NFKD", "Sequence"}
"""They change no sign of ASCII, and join nothing to a space."""
_PROBES = (
    "It is, as they say: a test. Isn't it? I'd say so; you'll see! We've e.g. 1,234.5 of 42 (x.y) things.",
    "<b>Tabs\tand  two spaces .\n\nNew lines, \r\n and ... dots. Yes!! No?! a.b,c;d:e!f?g 'quoted' \"text\" end.",
    "Na\u00efve caf\u00e9s \u2014 \u201cquotes\u201d, e\u0301, \u4f60\u597d, \U0001f642 yes. f(x): x+1; CamelCase",
    "1. One\n2. two:\n\n- a\n  - b\n\n\n\n# Title\n```\ndef f():\n\n    return 1\n```\n \nEnd\n\t\nof it \n\nall\n",
)


def _table(*ranges: str) -> NDArray[np.bool_]:
    """True at the code points of these ranges. What lies beyond its end is looked up as its last place: False."""
    table = np.zeros(0x10000, dtype=np.bool_)
    for first, last in ranges:
        table[ord(first) : ord(last) + 1] = True
    return table


_IS_SIGN = _table(*_SIGN_RANGES)
_IS_LETTER = _table("az", "AZ")


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts text for one tokenizer."""

    line_pieces: str = ""
    """Before these signs of ASCII the last new line is a piece of its own: so with GPT-2."""
    line_ends: str = ""
    """Before these a piece ends with the new line: Llama 3 takes new lines with the signs before them."""
    closers: str = ""
    """Signs of ASCII that no word takes to a letter before them."""
    added: tuple[str, ...] = ()
    """Tokens that are looked for before anything else, and end the words beside them."""

    def cuts(self, text: str) -> Places:
        """Where a piece begins: 0, and places of the text in order, not its end."""
        return np.flatnonzero(self.marks(text, codes_of(text))[:-1])

    def marks(self, text: str, codes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """For each place before a character of the text, and its end: whether it is a cut."""
        marks = np.zeros(len(codes) + 1, dtype=np.bool_)
        marks[0] = marks[-1] = True
        spaces = _inner(codes, _SPACE)
        marks[spaces[_at(_IS_SIGN, codes, spaces - 1) & _at(_IS_SIGN, codes, spaces + 1)]] = True
        if self.line_pieces or self.line_ends:
            lines = _inner(codes, _NEW_LINE)
            alone = lines[_at(_of_signs(self.line_pieces), codes, lines + 1)]
            alone = alone[_at(_IS_SIGN, codes, alone - 1) | (codes[alone - 1] == _NEW_LINE)]
            marks[alone] = marks[alone + 1] = True
            marks[lines[_at(_of_signs(self.line_ends), codes, lines + 1)] + 1] = True
        if self.closers:
            closers = np.flatnonzero(_of_signs(self.closers).take(codes[1:], mode="clip")) + 1
            marks[closers[_at(_IS_LETTER, codes, closers - 1)]] = True
        if self.added:
            marks[[place for match in _pattern(self.added).finditer(text) for place in match.span()]] = True
        return marks


@cache
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)))


@cache
def _of_signs(signs: str) -> NDArray[np.bool_]:
    return _table(*(sign * 2 for sign in signs))


def codes_of(text: str) -> NDArray[np.uint32]:
    """The code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def _inner(codes: NDArray[np.uint32], code: int) -> Places:
    """Where a character is that has one on both sides."""
    return np.flatnonzero(codes[1:-1] == code) + 1


def _at(table: NDArray[np.bool_], codes: NDArray[np.uint32], places: Places) -> NDArray[np.bool_]:
    return table.take(codes[places], mode="clip")


def cutter_for(tokenizer: PreTrainedTokenizerBase) -> Cutter | None:
    """How to cut text for this tokenizer; None where the tokens of a text may be others than those of its pieces.

    It must be a byte-level BPE tokenizer whose words end at the cuts.
    """
    state = backend_state(tokenizer)
    key = hash_json(state)
    if key not in _verdicts:
        _verdicts[key] = _cutter_for(tokenizer, state)
    return _verdicts[key]


_verdicts: dict[str, Cutter | None] = {}
"""By the hash of how a tokenizer works: to find out takes a second with a large vocabulary."""


def _cutter_for(tokenizer: PreTrainedTokenizerBase, state: dict[str, Any] | None) -> Cutter | None:
    if state is None or state["model"]["type"] != "BPE" or state["model"].get("dropout"):
        return None
    if "ByteLevel" not in _types(state["pre_tokenizer"]) or _types(state["normalizer"]) - _HARMLESS_NORMALISERS:
        return None
    tokens: list[dict[str, Any]] = state["added_tokens"]
    if any(_is_cut_through(token) for token in tokens) or not _words_end_at_spaces(tokenizer):
        return None
    # The longest first: of two that begin at one place the tokenizer takes it. Others are looked for in what is left.
    added = sorted((str(token["content"]) for token in tokens if not token["normalized"]), key=len, reverse=True)
    has_lines = any("\n" in str(token["content"]) for token in tokens)
    pieces, ends = ("", "") if has_lines else _line_signs(tokenizer)
    closers = "".join(sign for sign in _CLOSERS if _is_closer(tokenizer, sign, tokens))
    cutter = Cutter(pieces, ends, closers, tuple(added))
    return cutter if all(_is_same(tokenizer, cutter, probe) for probe in _PROBES) else None


def _types(part: dict[str, Any] | None) -> set[str]:
    """The types of a part of the tokenizer and of the parts that it is a sequence of."""
    if part is None:
        return set()
    inner: list[dict[str, Any]] = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {str(part["type"])}.union(*(_types(step) for step in inner))


def _is_cut_through(token: dict[str, Any]) -> bool:
    """Whether a cut could go through this added token, or through the spaces that it swallows beside it."""
    is_greedy = any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word"))
    return is_greedy or len(Cutter().cuts(str(token["content"]))) > 1


def _words_end_at_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Every sign of ASCII is tried on both sides of a cut: a word must begin there."""
    cases = [
        *((f"q{left}", f" {right}z") for left in _SIGNS for right in "aZ5.(\"<'"),
        *((f"q{left}", f" {right}z") for left in "aZ5.)\">'" for right in _SIGNS),
    ]
    return all(_has_cuts(tokenizer, left + right, [0, len(left)]) for left, right in cases)


def _line_signs(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The signs before which the last new line is a piece, and of the others those before which it ends one.

    Each is tried behind signs of all sorts, with what may stand between them.
    """
    pieces = "".join(sign for sign in _LINE_OPENINGS if _is_line_cut(tokenizer, sign, Cutter(line_pieces=sign)))
    others = (sign for sign in _LINE_OPENINGS if sign not in pieces)
    return pieces, "".join(sign for sign in others if _is_line_cut(tokenizer, sign, Cutter(line_ends=sign)))


def _is_line_cut(tokenizer: PreTrainedTokenizerBase, sign: str, cutter: Cutter) -> bool:
    lefts = _SIGNS if sign in "asZ5-*#" else "aZ5.,'\")/"
    cases = (
        *(f"q{left}{gap}{sign}z" for left in lefts for gap in ("\n", "\n\n")),
        *(f"q{left}{gap}{sign}{right}" for left in "a5." for gap in _GAPS for right in (" z", ".", "5")),
    )
    return all(_has_cuts(tokenizer, text, cutter.cuts(text).tolist()) for text in cases)


def _is_closer(tokenizer: PreTrainedTokenizerBase, sign: str, tokens: list[dict[str, Any]]) -> bool:
    """Whether a word always ends between a letter and this sign, and no added token goes over that place."""
    cutter = Cutter(closers=sign)
    if any(len(cutter.cuts(str(token["content"]))) > 1 for token in tokens):
        return False
    rights = (*_SIGNS, "", " ", " z", "  ", "\n", "\n\n", "\nz", "\r\n", "\t")
    cases = (f"{left}{sign}{right}" for left in ("z", "Z", "qz", " z", "5z", "'s") for right in rights)
    return all(_has_cuts(tokenizer, text, cutter.cuts(text).tolist()) for text in cases)


def _has_cuts(tokenizer: PreTrainedTokenizerBase, text: str, cuts: list[int]) -> bool:
    """Whether the words of a text are those of its pieces."""
    words = [
        (word, (begin + start, begin + end))
        for begin, after in pairwise([*cuts, len(text)])
        for word, (start, end) in words_of(tokenizer, text[begin:after])
    ]
    return words == words_of(tokenizer, text)


def _is_same(tokenizer: PreTrainedTokenizerBase, cutter: Cutter, text: str) -> bool:
    tokens: list[int] = []
    spans: list[Span] = []
    for begin, after in pairwise([*cutter.cuts(text).tolist(), len(text)]):
        own_tokens, own_spans = tokens_with_spans(tokenizer, text[begin:after])
        tokens += own_tokens
        spans += [(begin + start, begin + end) for start, end in own_spans]
    return (tokens, spans) == tokens_with_spans(tokenizer, text)
