"""Shares with their uncertainty: what every count of successes is reported with."""

from __future__ import annotations

from math import sqrt

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927): (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z95 * Z95
    centre = share + z2 / (2 * trials)
    spread = Z95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
