"""How far the best of N answers is from one answer."""

from __future__ import annotations

import math


def best_of_kl(n: int) -> float:
    """KL(best of n ‖ one answer) = ln n − (n − 1)/n in nats a sequence, whatever the model and the scores.

    Exact where no two answers have one score; where some have, an upper bound (Beirami et al. 2024, theorem 1).

    >>> [round(best_of_kl(n), 4) for n in (1, 2, 8)]
    [0.0, 0.1931, 1.2044]
    """
    return math.log(n) - (n - 1) / n
