"""Held-out pairs with their scores, which a reward report is made from, and the same as columns.

Shape letters: B pairs, K members of the ensemble. Differences are always chosen minus rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kedge.core.errors import ConfigError, DataError, NumericsError
from kedge.core.stats import Floats, Ints
from kedge.core.suggest import did_you_mean

Combine = Literal["mean", "worst", "uncertainty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """One held-out preference. Scores: one a member of the ensemble; lengths: tokens of the answers."""

    chosen: tuple[float, ...]
    rejected: tuple[float, ...]
    chosen_length: int
    rejected_length: int
    margin: float | None
    """Strength of the preference in the data, where given."""
    where: str
    """The file and line that the pair came from."""
    prompt: str
    chosen_text: str
    rejected_text: str

    def __post_init__(self) -> None:
        if len(self.chosen) != len(self.rejected) or not self.chosen:
            raise DataError(
                f"{self.where}: {len(self.chosen)} score(s) of the chosen answer and {len(self.rejected)} of the "
                "rejected one, expected one of each by every member of the ensemble"
            )
        for side, scores in (("chosen", self.chosen), ("rejected", self.rejected)):
            for member, score in enumerate(scores):
                if not math.isfinite(score):
                    raise NumericsError(
                        f"{self.where}: member {member} scored the {side} answer {score}, expected a finite number; "
                        "score it again, or leave the pair out and count it as failed"
                    )
        if self.margin is not None and not math.isfinite(self.margin):
            raise NumericsError(f"{self.where}: the margin is {self.margin}, expected a finite number or None")
        if min(self.chosen_length, self.rejected_length) < 0:
            raise DataError(
                f"{self.where}: answers of {self.chosen_length} and {self.rejected_length} tokens, expected 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The pairs as arrays. `correct_B` is 1, or ½ on a tie of scores, or 0; `prompt_B` numbers the prompts."""

    chosen_BK: Floats
    rejected_BK: Floats
    chosen_B: Floats
    rejected_B: Floats
    difference_B: Floats
    correct_B: Floats
    chosen_length_B: Floats
    rejected_length_B: Floats
    gap_B: Floats
    margin_B: Floats
    """NaN where the data give none."""
    prompt_B: Ints


def columns(pairs: Sequence[ScoredPair], *, combine: Combine, uncertainty_coef: float) -> Columns:
    """Prompts are numbered in the order of their text, so that the order of the pairs changes no number."""
    _check_combine(combine)
    if not pairs:
        raise DataError("no scored pairs: a reward model is judged on held-out pairs, so score at least one")
    _check_members(pairs)
    chosen_BK = np.array([pair.chosen for pair in pairs], dtype=np.float64)
    rejected_BK = np.array([pair.rejected for pair in pairs], dtype=np.float64)
    chosen_B = combined(chosen_BK, combine, uncertainty_coef=uncertainty_coef)
    rejected_B = combined(rejected_BK, combine, uncertainty_coef=uncertainty_coef)
    chosen_length_B = np.array([pair.chosen_length for pair in pairs], dtype=np.float64)
    rejected_length_B = np.array([pair.rejected_length for pair in pairs], dtype=np.float64)
    number = {prompt: at for at, prompt in enumerate(sorted({pair.prompt for pair in pairs}))}
    return Columns(
        chosen_BK=chosen_BK,
        rejected_BK=rejected_BK,
        chosen_B=chosen_B,
        rejected_B=rejected_B,
        difference_B=chosen_B - rejected_B,
        correct_B=won(chosen_B - rejected_B),
        chosen_length_B=chosen_length_B,
        rejected_length_B=rejected_length_B,
        gap_B=chosen_length_B - rejected_length_B,
        margin_B=np.array([math.nan if pair.margin is None else pair.margin for pair in pairs], dtype=np.float64),
        prompt_B=np.array([number[pair.prompt] for pair in pairs], dtype=np.int64),
    )


def combined(scores_BK: Floats, combine: Combine, *, uncertainty_coef: float) -> Floats:
    """One score from those of the members, as `kedge.algorithms.combine` does it on tensors.

    >>> scores_BK = np.array([[1.0, 3.0]])
    >>> [float(combined(scores_BK, how, uncertainty_coef=0.5)[0]) for how in ("mean", "worst", "uncertainty")]
    [2.0, 1.0, 1.5]
    """
    match combine:
        case "mean":
            return scores_BK.mean(axis=1)
        case "worst":
            return scores_BK.min(axis=1)
        case "uncertainty":
            return scores_BK.mean(axis=1) - uncertainty_coef * scores_BK.var(axis=1)


def won(difference_B: Floats) -> Floats:
    """1 where positive, ½ where zero, 0 where negative.

    >>> won(np.array([2.0, 0.0, -0.1])).tolist()
    [1.0, 0.5, 0.0]
    """
    return (np.sign(difference_B) + 1) / 2


def _check_combine(combine: str) -> None:
    allowed = get_args(Combine)
    if combine not in allowed:
        raise ConfigError(f"combine: found {combine!r}{did_you_mean(combine, allowed)}, expected {', '.join(allowed)}")


def _check_members(pairs: Sequence[ScoredPair]) -> None:
    expected = len(pairs[0].chosen)
    for pair in pairs:
        if len(pair.chosen) != expected:
            raise DataError(
                f"{pair.where}: scored by {len(pair.chosen)} member(s), but {pairs[0].where} by {expected}; "
                "every pair needs a score by every member"
            )
