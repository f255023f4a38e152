"""Two texts, word by word: what stayed, what went, what came. Blanks belong to the word before them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

_WORDS = re.compile(r"\S+\s*|^\s+")
_MOST_WORDS = 2000
"""Matching takes time with the square of the words; longer texts are shown whole, as gone and come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    kind: Literal["same", "gone", "new"]
    text: str


def word_diff(before: str, after: str) -> tuple[Piece, ...]:
    """The pieces of both texts in reading order.

    >>> [(piece.kind, piece.text) for piece in word_diff("the old cat sat", "the cat sat down")]
    [('same', 'the '), ('gone', 'old '), ('same', 'cat sat '), ('new', 'down')]
    """
    one, other = _WORDS.findall(before), _WORDS.findall(after)
    if len(one) + len(other) > _MOST_WORDS:
        return _pieces([("gone", before), ("new", after)] if before != after else [("same", after)])
    found: list[tuple[Literal["same", "gone", "new"], str]] = []
    bare = [word.strip() for word in one], [word.strip() for word in other]
    for what, i, j, k, m in SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        if what == "equal":
            found.append(("same", "".join(other[k:m])))
        else:
            found.append(("gone", _spaced("".join(one[i:j]))))
            found.append(("new", "".join(other[k:m])))
    return _pieces(found)


def _spaced(text: str) -> str:
    """The last word of a text has no blank of its own; beside what came instead it needs one."""
    return text if not text or text[-1].isspace() else f"{text} "


def _pieces(found: list[tuple[Literal["same", "gone", "new"], str]]) -> tuple[Piece, ...]:
    return tuple(Piece(kind=kind, text=text) for kind, text in found if text)
