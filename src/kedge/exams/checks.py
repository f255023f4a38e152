"""Is a written answer right? Four checks that need no judge."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal

import regex

from kedge.core.errors import DataError

Check = Literal["contains", "equals", "number", "regex"]
CHECKS: Final[tuple[Check, ...]] = ("contains", "equals", "number", "regex")
_SECONDS: Final = 1.0
_NUMBER = regex.compile(r"[-−+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-−+]?\.\d+")


def is_right(check: Check, wanted: Sequence[str], text: str) -> bool:
    """Whether one of the wanted answers is given.

    >>> is_right("contains", ["4"], "It is 4."), is_right("contains", ["4"], "It is 14.")
    (True, False)
    >>> is_right("equals", ["Paris"], " paris. "), is_right("number", ["1200"], "So 3 x 400 = 1,200 apples.")
    (True, True)
    >>> is_right("regex", [r"^\\w+, \\w+$"], "red, blue")
    True
    """
    return any(_MEANS[check](answer, text) for answer in wanted)


def problem_of(check: Check, wanted: str) -> str | None:
    """Why nothing can be checked with it; None where it can."""
    if check == "number" and last_number(wanted) is None:
        return "a number"
    if check == "regex":
        try:
            regex.compile(wanted)
        except regex.error as error:
            return f"a regular expression ({error})"
    return None if wanted.strip() else "a text"


def last_number(text: str) -> float | None:
    """The last number of a text; commas between thousands do not count.

    >>> last_number("from 2 to −1,500.5 km"), last_number("none")
    (-1500.5, None)
    """
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None


def _contains(wanted: str, text: str) -> bool:
    """Letters and digits beside it are not: 4 is not in 14."""
    pattern = rf"(?<![^\W_]){regex.escape(_plain(wanted))}(?![^\W_])"
    return regex.search(pattern, _plain(text)) is not None


def _equals(wanted: str, text: str) -> bool:
    return _plain(wanted).rstrip(".!") == _plain(text).rstrip(".!")


def _same_number(wanted: str, text: str) -> bool:
    expected, number = last_number(wanted), last_number(text)
    return expected is not None and number is not None and math.isclose(expected, number, rel_tol=1e-9, abs_tol=1e-9)


def _matches(wanted: str, text: str) -> bool:
    try:
        return regex.search(wanted, text.strip(), timeout=_SECONDS) is not None
    except TimeoutError as error:
        raise DataError(
            f"the regular expression {wanted!r} takes longer than {_SECONDS:g} s; make it simpler"
        ) from error


def _plain(text: str) -> str:
    """Without differences of case, width and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


_MEANS = {"contains": _contains, "equals": _equals, "number": _same_number, "regex": _matches}
