"""What is done to a score before it becomes a reward: clipping, running normalisation, length, missing ends.

A score is one number an answer, from one reward source; several sources are joined in `combine`. A NaN score (its
source failed) stays NaN everywhere here, and is refused where it would be remembered.
Shape letters: B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.core.errors import CheckpointError, ConfigError, NumericsError
from kedge.core.loss import widen


def clip_scores(scores_B: Tensor, *, limit: float) -> Tensor:
    """Scores within [-limit, limit].

    >>> clip_scores(torch.tensor([-7., 0.5, 9.]), limit=5.0).tolist()
    [-5.0, 0.5, 5.0]
    """
    _check_positive("limit", limit)
    return widen(scores_B).clamp(-limit, limit)


def length_penalty(length_B: Tensor, *, coef: float, target: float) -> Tensor:
    """coef (1 - length / target), to be added to the score (Singhal et al. 2023, "A long way to go", section 4).

    A bonus below the target, a penalty above. The paper's coef is a moving std of the scores; here it is given.

    >>> length_penalty(torch.tensor([50, 100, 150]), coef=2.0, target=100).tolist()
    [1.0, 0.0, -1.0]
    """
    _check_positive("target", target)
    return coef * (1 - widen(length_B) / target)


def overlong_penalty(length_B: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), to be added to the score.

    0 up to max_length - buffer tokens, then linear down to -1 at max_length, and -1 beyond.

    >>> overlong_penalty(torch.tensor([80, 85, 100, 120]), max_length=100, buffer=20).tolist()
    [0.0, -0.25, -1.0, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"buffer: found {buffer}, expected 1 to {max_length} tokens, the max_length")
    return ((max_length - buffer - widen(length_B)) / buffer).clamp(-1, 0)


def missing_eos_penalty(scores_B: Tensor, finished_B: Tensor, *, penalty: float) -> Tensor:
    """score - penalty where the answer did not end by itself: still ranks cut answers by their score.

    >>> missing_eos_penalty(torch.tensor([3., 4.]), torch.tensor([True, False]), penalty=1.5).tolist()
    [3.0, 2.5]
    """
    scores_B = widen(scores_B)
    return torch.where(finished_B, scores_B, scores_B - penalty)


def missing_eos_score(scores_B: Tensor, finished_B: Tensor, *, score: float) -> Tensor:
    """`score` in place of the score where the answer did not end by itself (Huang et al. 2024, "EOS trick": -1).

    >>> missing_eos_score(torch.tensor([3., 4.]), torch.tensor([True, False]), score=-1.0).tolist()
    [3.0, -1.0]
    """
    scores_B = widen(scores_B)
    return torch.where(finished_B, scores_B, scores_B.new_full((), score))


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of every score seen so far, in float64 (Chan et al. 1979, eq. 2.1).

    Shards merged, in any order, give what one pass over all gives. Zheng et al. 2023 ("Secrets of RLHF", section
    5.3.1) normalise and clip rewards so; their per-batch variant is left out.

    >>> moments = RunningMoments()
    >>> moments.update(torch.tensor([1., 3.]))
    >>> moments.update(torch.tensor([8.]))
    >>> moments.mean, round(moments.variance, 4)
    (4.0, 8.6667)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def variance(self) -> float:
        """Of the population (divided by n); 0 before the first score."""
        return self.squares / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def update(self, scores: Tensor) -> None:
        """Takes in a batch of scores; one that is not finite is refused, and nothing is changed."""
        scores = scores.detach().double().flatten()
        if scores.numel() == 0:
            return
        if bad := int((~scores.isfinite()).sum()):
            raise NumericsError(
                f"{bad} of {scores.numel()} scores are not finite; the running moments were not changed. "
                "Drop the rows whose reward source failed before this"
            )
        mean = scores.mean().item()
        self.merge(RunningMoments(count=scores.numel(), mean=mean, squares=(scores - mean).square().sum().item()))

    def merge(self, other: RunningMoments) -> None:
        """Takes in what another one has seen."""
        total = self.count + other.count
        if total == 0:
            return
        gap = other.mean - self.mean
        self.mean += gap * other.count / total
        self.squares += other.squares + gap * gap * self.count * other.count / total
        self.count = total

    def normalise(self, scores_B: Tensor, *, centre: bool, eps: float = 1e-6) -> Tensor:
        """(scores - mean) / std, or scores / std without centring, which keeps the sign of a score.

        While the scores seen hardly differ (std at most eps) they are not divided: noise is not blown up.

        >>> moments = RunningMoments(count=2, mean=3.0, squares=8.0)
        >>> scores_B = torch.tensor([5., 1.])
        >>> moments.normalise(scores_B, centre=True).tolist(), moments.normalise(scores_B, centre=False).tolist()
        ([1.0, -1.0], [2.5, 0.5])
        """
        shifted_B = widen(scores_B) - (self.mean if centre else 0.0)
        return shifted_B / self.std if self.std > eps else shifted_B

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: Mapping[str, Any]) -> None:
        match state:
            case {"count": int(count), "mean": float(mean), "squares": float(squares)}:
                self.count, self.mean, self.squares = count, mean, squares
            case _:
                raise CheckpointError(f"running moments: found {dict(state)}, expected count, mean and squares")


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ConfigError(f"{name}: found {value}, expected more than 0")
