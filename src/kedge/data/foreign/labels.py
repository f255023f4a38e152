"""Verdicts as data files write them: words, booleans, emoji and signs for good and bad; numbers that must be finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kedge.core.errors import DataError
from kedge.data.messages import shown

_OPPOSITES = (
    "up down",
    "thumbs_up thumbs_down",
    "thumb_up thumb_down",
    "thumbsup thumbsdown",
    "👍 👎",
    "✅ ❌",
    "🙂 🙁",
    "good bad",
    "yes no",
    "y n",
    "true false",
    "t f",
    "positive negative",
    "pos neg",
    "chosen rejected",
    "accepted rejected",
    "accept reject",
    "preferred dispreferred",
    "desirable undesirable",
    "like dislike",
    "liked disliked",
    "upvote downvote",
    "correct incorrect",
    "right wrong",
    "pass fail",
    "passed failed",
    "helpful unhelpful",
    "safe unsafe",
    "1 0",
    "+1 -1",
)
WORDS: Mapping[str, bool] = {
    word: is_good for line in _OPPOSITES for word, is_good in zip(line.split(), (True, False), strict=True)
}
"""What a label may say, in lower case and with `_` for spaces."""

_NUMBERS: Mapping[float, bool] = {1.0: True, 0.0: False, -1.0: False}
LABEL_WORDS = "good/bad, yes/no, up/down, true/false, positive/negative, chosen/rejected, 👍/👎, 1/0 or 1/-1"
_MODIFIERS = dict.fromkeys([0xFE0F, *range(0x1F3FB, 0x1F400)])  # emoji presentation and skin tones


def label_of(value: Any) -> bool | None:
    """Whether a label says good; None where it says neither.

    >>> label_of("Thumbs up"), label_of("👎🏽"), label_of(-1), label_of("rejected"), label_of(3), label_of("neutral")
    (True, False, False, False, None, None)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _NUMBERS.get(_as_float(value))
    if not isinstance(value, str):
        return None
    word = value.strip().casefold().translate(_MODIFIERS).replace(" ", "_").replace("-up", "_up")
    word = word.replace("-down", "_down")
    return WORDS.get(word)


def is_label(value: Any) -> bool:
    return label_of(value) is not None


def is_word_label(value: Any) -> bool:
    """A label that cannot be a step of a longer scale: 1 may be one star of five."""
    return isinstance(value, bool | str) and is_label(value) and str(value).strip().lstrip("+-") not in ("0", "1")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite(value: Any, field: str) -> float:
    """A number of a data row, also as text; what is no finite number is a DataError that names the field."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(_as_float(number)):
        what = "too large a number" if isinstance(number, int) and not isinstance(number, bool) else shown(value)
        raise DataError(f"'{field}' is {what}; it must be a finite number")
    return number
