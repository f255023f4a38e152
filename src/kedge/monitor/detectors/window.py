"""What a detector sees of a run: its first steps, its latest ones, and the KL it was promised. Plain numbers only.

Left out: everything in between. What a rule remembers has to fit into these two pieces, which a checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from kedge.core.findings import Level

START = 5
"""Steps that `early` averages: the policy has hardly moved by then, and five batches even out the noise of one."""
RECENT = 40
"""Steps that are remembered."""

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rule found: one sentence with numbers, and the numbers."""

    message: str
    evidence: Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`recent` ends with the step at hand and holds at most `RECENT` steps; `start` are the first `START` of the run.

    A metric that a step lacks, or whose value is not finite, is left out of every average.
    """

    start: Sequence[Row]
    recent: Sequence[Row]
    num_steps: int
    kl_target: float | None = None
    kl_limit: float | None = None

    def values(self, name: str) -> list[float]:
        """The finite values of a metric in the recent steps, in order."""
        return [value for row in self.recent if math.isfinite(value := row.get(name, math.nan))]

    def is_fresh(self, name: str) -> bool:
        """Whether the step at hand has the metric: old values are not judged again."""
        return bool(self.recent) and math.isfinite(self.recent[-1].get(name, math.nan))

    def mean(self, name: str, last: int) -> float | None:
        """Mean of the last values; None until there are so many, or when this step has none."""
        values = self.values(name)
        return fmean(values[-last:]) if self.is_fresh(name) and len(values) >= last else None

    def early(self, name: str) -> float | None:
        """Mean over the first steps, once they are over: None before, so that nothing is compared with itself."""
        values = [value for row in self.start if math.isfinite(value := row.get(name, math.nan))]
        return fmean(values) if values and self.num_steps >= 2 * START else None

    def before(self, name: str, *, last: int, at_most: int, at_least: int) -> float | None:
        """Median of up to `at_most` values before the `last` ones; None when there are fewer than `at_least`."""
        earlier = self.values(name)[:-last][-at_most:]
        return median(earlier) if self.is_fresh(name) and len(earlier) >= at_least else None


Rule = Callable[[Window, float], Sign | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """A rule with everything that a person wants to know about it. `source` says where its threshold comes from."""

    code: str
    level: Level = "warning"
    reads: tuple[str, ...]
    rule: Rule = field(repr=False)
    says: str
    source: str
    cause: str
    advice: str


def trend(values: Sequence[float]) -> float:
    """t statistic of the least-squares slope over equal steps; 0 for fewer than four values, ±inf for a perfect line.

    Neighbouring steps share a policy, so their residuals go together: with a correlation r > 0 from one to the next,
    n values are worth n (1 - r) / (1 + r), and t is smaller by the root of that share.

    Of 0, 2, 1, 3: slope 0.8, residuals -0.3, 0.9, -0.9, 0.3, r < 0; t = 0.8 / sqrt(1.8 / 2 / 5).

    >>> round(trend([0.0, 2.0, 1.0, 3.0]), 4)
    1.8856
    """
    n = len(values)
    if n < 4:
        return 0.0
    centre, mean = (n - 1) / 2, fmean(values)
    spread = sum((x - centre) ** 2 for x in range(n))
    slope = sum((x - centre) * (y - mean) for x, y in enumerate(values)) / spread
    left = [y - mean - slope * (x - centre) for x, y in enumerate(values)]
    squares = sum(one * one for one in left)
    # What rounding leaves of a perfect line is no noise.
    if squares <= 1e-24 * sum(y * y for y in values):
        return math.copysign(math.inf, slope) if slope else 0.0
    together = max(0.0, sum(a * b for a, b in pairwise(left)) / squares)
    return slope / math.sqrt(squares / (n - 2) / spread) * math.sqrt((1 - together) / (1 + together))
