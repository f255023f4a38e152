"""Text of others inside our messages: nothing in it moves a cursor, turns a line around, or fills the screen."""

from __future__ import annotations

import json
import re
from typing import Any, Final

LONGEST: Final = 200
"""Characters of one value that a message shows."""

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but for line breaks and tabs
    "\xad\u180e\u200b\u2060-\u2065\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # not seen, and not spelling anything
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f"  # turn the direction of what follows, or break lines
    "\ud800-\udfff]"  # halves of characters, which no terminal or file takes
)


def escaped(text: str) -> str:
    r"""The text with control, bidi and invisible characters written out. Line breaks, tabs and joiners stay.

    >>> print(escaped("re\x1b[2Jward\u202e"))
    re\x1b[2Jward\u202e
    """
    return _HIDDEN.sub(lambda match: _written_out(match[0]), text.replace("\r\n", "\n"))


def escaped_json(text: str) -> str:
    """The same for text that is JSON, which stays JSON of the same value."""
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def one_line(text: str, longest: int = LONGEST) -> str:
    r"""A name or key within a line of a message: escaped, line breaks too, and cut where it is long.

    >>> one_line("a\nb")
    'a\\nb'
    >>> one_line("x" * 300, longest=4)
    'xxxx… (300 characters)'
    """
    shown = escaped(text[:longest]).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(text) <= longest else f"{shown}… ({len(text):,} characters)"


def quoted(value: Any, longest: int = LONGEST) -> str:
    """A value as Python writes it, for "found …": escaped, on one line, and cut where it is long.

    >>> quoted("seven"), quoted(10**400)
    ("'seven'", 'a whole number of more than 300 digits')
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a whole number of more than 300 digits"
    try:
        return one_line(repr(value), longest)
    except (ValueError, RecursionError):  # a number inside that is too long to be written, or endless nesting
        return f"a {type(value).__name__} that cannot be shown"


def _written_out(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def count(number: int, noun: str, plural: str = "") -> str:
    """
    >>> count(1, "answer"), count(512, "response"), count(2, "micro-batch", "micro-batches")
    ('1 answer', '512 responses', '2 micro-batches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
