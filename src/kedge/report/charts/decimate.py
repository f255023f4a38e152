"""Long runs in few points: of each stretch the lowest, the highest and one bad value stay, so no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_POINTS = 500
"""About one a pixel of a chart, also on a wide screen."""

Column = Sequence[float | None]


def kept_rows(columns: Sequence[Column], most: int = MOST_POINTS) -> list[int]:
    """Rows, at most `most` of them, that show all columns: the first and last row, and the extremes of each stretch.

    A column has None where it has no value, and NaN or infinity where a value was not finite; one such row a stretch
    stays as well.

    >>> kept_rows([[0.0, 5.0, 1.0, 2.0, -7.0, 3.0, 2.0, 2.5, 2.0, 4.0]], most=8)
    [0, 1, 4, 6, 9]
    """
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= most:
        return list(range(num_rows))
    kept = {0, num_rows - 1}
    num_stretches = max(1, (most - 2) // (3 * len(columns)))
    for stretch in range(num_stretches):
        rows = range(stretch * num_rows // num_stretches, (stretch + 1) * num_rows // num_stretches)
        for column in columns:
            kept.update(_telling(column, rows))
    return sorted(kept)


def _telling(column: Column, rows: range) -> list[int]:
    """The rows of the lowest and the highest value, and the first one whose value is not finite."""
    given = [(value, row) for row in rows if (value := column[row]) is not None]
    finite = [(value, row) for value, row in given if math.isfinite(value)]
    bad = [row for value, row in given if not math.isfinite(value)][:1]
    return [min(finite)[1], max(finite)[1], *bad] if finite else bad
