"""A score, or why an answer has none; and what code of the user's returned, read as scores.

Every wrong kind of result has one message, with the source and the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set, Sized
from dataclasses import dataclass
from numbers import Real
from typing import Any, SupportsFloat

from kedge.core.errors import RewardError

_LARGEST = 3.4028234663852886e38
"""The largest float32, which scores become."""
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class ScoreResult:
    score: float
    """NaN where the answer could not be scored."""
    reason: str = ""
    """Why it could not."""

    @property
    def is_scored(self) -> bool:
        return math.isfinite(self.score)


def unscored(reason: str) -> ScoreResult:
    return ScoreResult(math.nan, reason)


def failure(error: BaseException) -> ScoreResult:
    """No score, because code of the user's raised. That includes SystemExit: a reward does not end a run."""
    return unscored(f"{type(error).__name__}: {error}")


def score_of(value: SupportsFloat, *, giver: str) -> ScoreResult:
    """A number as a score; one that is not finite, or too large for the float32 that it becomes, is none.

    >>> score_of(10**400, giver="the server").reason
    'the server gave a number too large for a score'
    """
    try:
        number = float(value)
    except OverflowError:
        return unscored(f"{giver} gave a number too large for a score")
    if not math.isfinite(number):
        return unscored(f"{giver} gave {number}")
    if abs(number) > _LARGEST:
        return unscored(f"{giver} gave {number:g}, too large for a score")
    return ScoreResult(number)


def read_scores(returned: Any, rows: int, *, name: str, giver: str = "the function") -> list[ScoreResult]:
    """One result an answer; `name` is what messages call the function or plugin that returned it.

    >>> read_scores([1, None, True], 3, name="f")[2]
    ScoreResult(score=1.0, reason='')
    """
    scores = _as_list(returned, rows, name)
    if len(scores) != rows:
        raise RewardError(f"{name} returned {len(scores)} scores for {rows} answers; one for each is needed")
    return [read_score(score, name=name, row=row, rows=rows, giver=giver) for row, score in enumerate(scores, start=1)]


def read_score(score: Any, *, name: str, row: int, rows: int, giver: str = "the function") -> ScoreResult:
    """One score, of answer `row` of `rows`: a number, or None for no score. True and False are 1 and 0."""
    if score is None:
        return unscored(f"{giver} gave None")
    shape = _shape(score)
    if shape is not None and all(size == 1 for size in shape):  # a scalar of torch or numpy
        score = score.item()
    if not isinstance(score, Real):
        what = type(score).__name__ if shape is None else f"{type(score).__name__} of shape {shape}"
        raise RewardError(
            f"{name} returned {_shown(score)} as the score of answer {row} of {rows}, a {what}; expected a number or "
            "None"
        )
    return score_of(score, giver=giver)


def _as_list(returned: Any, rows: int, name: str) -> list[Any]:
    expected = f"expected a list of {rows} numbers"
    shape = _shape(returned)
    if shape is not None:
        if len(shape) != 1:
            raise RewardError(f"{name} returned a {type(returned).__name__} of shape {shape}, {expected}")
        return list(returned.tolist())  # at once: from an accelerator each number would be a wait of its own
    if isinstance(returned, Iterable) and not isinstance(returned, Sized):
        raise RewardError(f"{name} returned a {type(returned).__name__}, {expected}; put list(…) around it")
    if not isinstance(returned, Iterable) or isinstance(returned, Mapping | Set | str | bytes):
        raise RewardError(f"{name} returned a {type(returned).__name__}, {expected}")
    return list(returned)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array of torch, numpy or their like; None for anything else."""
    shape = getattr(value, "shape", None)
    return None if shape is None or not hasattr(value, "tolist") else tuple(shape)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
