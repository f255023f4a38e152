"""Agreement of two rankings of the same answers. 1 is best and equal ranks are ties, as in ranking data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import Floats


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float | None:
    """(concordant − discordant pairs) / √(pairs that a orders · pairs that b orders) (Kendall 1945).

    None where one of the two puts everything on one rank.

    >>> kendall_tau_b([1, 2, 3], [1, 3, 2]), kendall_tau_b([1, 1], [1, 2])
    (0.3333333333333333, None)
    """
    order_a, order_b = _orders(a, b)
    pairs_a, pairs_b = float(np.square(order_a).sum()), float(np.square(order_b).sum())
    return float((order_a * order_b).sum()) / math.sqrt(pairs_a * pairs_b) if pairs_a and pairs_b else None


def strict_pair_agreement(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Of the pairs of answers that both put in an order, the share in the same one; None where there is no such pair.

    >>> strict_pair_agreement([1, 2, 3], [1, 3, 2]), strict_pair_agreement([1, 2, 2], [1, 2, 3])
    (0.6666666666666666, 1.0)
    """
    order_a, order_b = _orders(a, b)
    both = order_a * order_b
    return float((both > 0).sum() / (both != 0).sum()) if (both != 0).any() else None


def _orders(a: Sequence[float], b: Sequence[float]) -> tuple[Floats, Floats]:
    """For each pair of answers −1, 0 or 1: which of the two is ranked better."""
    if len(a) != len(b) or len(a) < 2:
        raise DataError(f"two rankings of the same answers, at least two: found {len(a)} ranks and {len(b)}")
    pairs = np.triu_indices(len(a), k=1)
    rank_a, rank_b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return np.sign(rank_a[pairs[0]] - rank_a[pairs[1]]), np.sign(rank_b[pairs[0]] - rank_b[pairs[1]])
