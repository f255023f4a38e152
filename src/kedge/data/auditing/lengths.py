"""How long the sides of a file are: percentiles and histograms, computed from whole columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.data.auditing.result import Histogram, Lengths, Unit
from kedge.data.auditing.scan import Scan

Column = NDArray[Any]

_BINS = 24


def column(values: array[int]) -> Column:
    """The column as numpy sees it, without a copy."""
    return np.asarray(values)


def lengths(scan: Scan) -> Iterator[Lengths]:
    for name, side in scan.sides.items():
        columns: tuple[tuple[Unit, array[int]], ...] = (
            ("characters", side.characters),
            ("words", side.words),
            ("tokens", side.tokens),
        )
        for unit, values in columns:
            if values:
                p5, p50, p95 = np.percentile(column(values), (5, 50, 95), method="inverted_cdf").tolist()
                mean, longest = float(column(values).mean()), int(column(values).max())
                yield Lengths(side=name, unit=unit, count=len(values), mean=mean, p5=p5, p50=p50, p95=p95, max=longest)


def histograms(scan: Scan) -> Iterator[Histogram]:
    """Bins on a logarithmic scale, the same for every side so that they can be compared by eye."""
    longest = max((int(column(side.characters).max()) for side in scan.sides.values() if side.characters), default=0)
    edges = np.unique(np.append(0, np.geomspace(1, longest + 1, _BINS).round().astype(np.int64)))
    if len(edges) < 2:
        return
    for name, side in scan.sides.items():
        counts, _ = np.histogram(column(side.characters), bins=edges)
        yield Histogram(side=name, edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))
