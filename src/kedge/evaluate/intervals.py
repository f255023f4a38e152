"""Means over prompts, and how sure they are: the percentile bootstrap (Efron 1979) over prompts.

A prompt is one number, whatever goes into it, so that answers to one prompt are never taken for independent ones, and
two models that answered the same prompts stay paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
"""Bootstrap samples: the ends of a 95 % interval then move by about 2 % of its width from seed to seed."""
_NUMBERS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over so many prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int


def estimate(values: Sequence[float], *, seed: int, draws: int = DRAWS) -> Estimate | None:
    """The mean of one number a prompt; None without prompts. The same seed draws the same prompts for any values.

    >>> estimate([4.0, 4.0, 4.0], seed=0)
    Estimate(mean=4.0, low=4.0, high=4.0, prompts=3)
    """
    if not values:
        return None
    values_P = np.asarray(values, dtype=np.float64)
    means = [values_P[rows].mean(axis=1) for rows in resamples(len(values), seed=seed, draws=draws)]
    low, high = ends(np.concatenate(means))
    return Estimate(mean=float(values_P.mean()), low=low, high=high, prompts=len(values))


def resamples(count: int, *, seed: int, draws: int) -> Iterator[NDArray[np.int64]]:
    """`draws` bootstrap samples of `count` rows, as row numbers (some draws at a time, count)."""
    rng = np.random.default_rng(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // count)
    for done in range(0, draws, at_once):
        yield rng.integers(0, count, size=(min(at_once, draws - done), count))


def ends(drawn: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of what was drawn."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)
