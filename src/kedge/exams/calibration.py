"""What a model thinks of its own choices: probabilities over them, and how far these can be believed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS = 10


def probabilities(logprobs: Sequence[float]) -> tuple[float, ...]:
    """The choices among themselves: a softmax of their log-probabilities.

    >>> probabilities([0.0, 0.0])
    (0.5, 0.5)
    """
    logp_C = np.asarray(logprobs, dtype=np.float64)
    mass_C = np.exp(logp_C - logp_C.max())
    return tuple((mass_C / mass_C.sum()).tolist())


def length_normalised(logprobs: Sequence[float], choices: Sequence[str]) -> tuple[float, ...]:
    """Log-probabilities a byte, at the mean length of the choices: longer texts are no less likely for being longer.

    >>> length_normalised([-2.0, -3.0], ["ab", "abcd"])
    (-3.0, -2.25)
    """
    sizes = [max(1, len(choice.encode())) for choice in choices]
    mean = sum(sizes) / len(sizes)
    return tuple(logp / size * mean for logp, size in zip(logprobs, sizes, strict=True))


def brier(share: Sequence[float], right: int) -> float:
    """Σ (p − y)² over the choices (Brier 1950): 0 is certain and right, 2 certain and wrong.

    >>> brier([0.5, 0.5], 0)
    0.5
    """
    return sum((p - (place == right)) ** 2 for place, p in enumerate(share))


def expected_calibration_error(confidence: Sequence[float], right: Sequence[float], *, bins: int = BINS) -> float:
    """Mean over items of |confidence − share that is right| in bins of equal width (Guo et al. 2017).

    >>> expected_calibration_error([0.9, 0.9, 0.6, 0.6], [1, 1, 1, 0])
    0.1
    """
    confidence_N, right_N = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    bin_N = np.minimum((confidence_N * bins).astype(np.int64), bins - 1)
    gap_B = np.bincount(bin_N, weights=confidence_N - right_N, minlength=bins)
    return round(float(np.abs(gap_B).sum() / len(confidence_N)), 12)
