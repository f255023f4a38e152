"""Runs every detector that is switched on over the metrics, step by step, and raises one alarm at each onset.

A detector that has raised an alarm is silent until its rule has been quiet for `REARM` steps. Left out: any decision;
what to do about an alarm is up to its reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from kedge.core.findings import Level
from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors.settings import DetectorSettings

REARM = 10
"""Quiet steps after which a detector may raise its alarm again: the steps of the old one have then left an average over
ten."""


class Watchdog:
    """`observe` each step in order. `state` is plain JSON types, so that a resumed run raises the same alarms."""

    def __init__(
        self,
        catalogue: Sequence[Detector],
        settings: DetectorSettings,
        *,
        kl_target: float | None,
        kl_limit: float | None,
        score_std: float | None = None,
        precision: str = "bfloat16",
    ) -> None:
        """`score_std` is the spread that scores are normalised to; None where they are not. `precision` is the type
        that generator and trainer compute in."""
        self._thresholds = {
            detector: threshold
            for detector in catalogue
            if (threshold := settings.threshold(detector.code, precision=precision)) is not None
        }
        self._read = MetricNames.of(catalogue)
        self._kl_target, self._kl_limit, self._score_std = kl_target, kl_limit, score_std
        self._start: list[Row] = []
        self._recent: list[Row] = []
        self._num_steps = 0
        self._quiet_for: dict[str, int] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the metrics of one step; the alarms that begin with it."""
        row = {name: float(value) for name, value in metrics.items() if name in self._read}
        self._recent = recent = [*self._recent, row][-RECENT:]
        return self.look(
            step, row, lambda name: [row.get(name, math.nan) for row in recent], num_steps=self._num_steps + 1
        )

    def look(self, step: int, latest: Row, column: Column, *, num_steps: int) -> list[Alarm]:
        """The alarms that begin with the last of `num_steps` steps, of a run that is at hand as a whole.

        Steps between the one that was looked at before and this one count as quiet.
        """
        if skipped := num_steps - self._num_steps - 1:
            self._quiet_for = {code: count + skipped for code, count in self._quiet_for.items()}
        self._num_steps = num_steps
        if len(self._start) < START:
            self._start.append(latest)
        window = Window(
            start=self._start,
            latest=latest,
            column=column,
            num_steps=num_steps,
            kl_target=self._kl_target,
            kl_limit=self._kl_limit,
            score_std=self._score_std,
        )
        alarms = (self._apply(detector, threshold, window, step) for detector, threshold in self._thresholds.items())
        return [alarm for alarm in alarms if alarm is not None]

    def state(self) -> dict[str, Any]:
        return {
            "start": [dict(row) for row in self._start],
            "recent": [dict(row) for row in self._recent],
            "num_steps": self._num_steps,
            "quiet_for": dict(self._quiet_for),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._start = [dict(row) for row in state["start"]]
        self._recent = [dict(row) for row in state["recent"]]
        self._num_steps = state["num_steps"]
        self._quiet_for = dict(state["quiet_for"])

    def _apply(self, detector: Detector, threshold: float, window: Window, step: int) -> Alarm | None:
        """The alarm of one detector where its rule sees a sign and it is armed."""
        sign = detector.rule(window, threshold)
        is_armed = detector.code not in self._quiet_for
        if sign is None:
            is_look = any(name in detector.names for name in window.latest) if detector.is_at_looks else True
            if not is_armed and is_look:
                self._count_quiet_step(detector.code)
            return None
        self._quiet_for[detector.code] = 0
        if not is_armed:
            return None
        return Alarm(
            level=detector.level,
            code=detector.code,
            message=sign.message,
            step=step,
            evidence=sign.evidence,
            cause=detector.cause,
            advice=detector.advice,
        )

    def _count_quiet_step(self, code: str) -> None:
        """After `REARM` quiet steps the detector is armed again."""
        self._quiet_for[code] += 1
        if self._quiet_for[code] >= REARM:
            del self._quiet_for[code]


START = 5
"""Steps that `early` averages: the policy has hardly moved by then, and five batches average out the noise of one."""
RECENT = 40
"""The most recent steps, as many as are kept."""

NORMAL = 1.4826
"""Standard deviation of a centred normal variable over the median of its absolute value."""

Row = Mapping[str, float]
Column = Callable[[str], list[float]]
"""From a metric's name to its values in the recent steps, in order, NaN where a step lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The finding of a rule: one sentence with numbers, and the numbers."""

    message: str
    evidence: Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`latest` is the step at hand, with which `column` ends; `start` are the first `START` steps of the run.

    A metric that a step lacks, or whose value is not finite, is left out of every average.
    """

    start: Sequence[Row]
    latest: Row
    column: Column
    num_steps: int
    kl_target: float | None = None
    kl_limit: float | None = None
    score_std: float | None = None
    """The spread that scores are normalised to; None where they are not."""
    _finite: dict[str, list[float]] = field(default_factory=dict[str, list[float]], init=False, repr=False)
    """A cache of `values`: several rules read the same metric."""

    def values(self, name: str) -> list[float]:
        """The finite values of a metric in the recent steps, in order."""
        if name not in self._finite:
            self._finite[name] = list(filter(math.isfinite, self.column(name)))
        return self._finite[name]

    def is_fresh(self, name: str) -> bool:
        """Whether the step at hand has the metric: a rule is not applied to the same values twice."""
        return math.isfinite(self.latest.get(name, math.nan))

    def mean(self, name: str, last: int) -> float | None:
        """Mean of the `last` latest values; None until there are so many, or when this step has none."""
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
    """A rule with its documentation. `says` is the rule in words; `source` says where its threshold comes from."""

    code: str
    level: Level = "warning"
    reads: tuple[str, ...]
    """Names of metrics; `exam/*` are all that begin so."""
    rule: Rule = field(repr=False)
    says: str
    source: str
    cause: str
    advice: str
    is_at_looks: bool = False
    """Whether the first of what it reads is there at some steps alone: those between them are not quiet ones."""

    @property
    def names(self) -> MetricNames:
        """What tells a look."""
        return MetricNames.of_names(self.reads[:1])


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Names of metrics, and beginnings of names."""

    names: frozenset[str]
    beginnings: tuple[str, ...]

    @classmethod
    def of(cls, detectors: Sequence[Detector]) -> MetricNames:
        """All that any of these reads."""
        return cls.of_names([name for detector in detectors for name in detector.reads])

    @classmethod
    def of_names(cls, names: Sequence[str]) -> MetricNames:
        """
        >>> read = MetricNames.of_names(["kl/mean", "exam/*"])
        >>> "kl/mean" in read, "exam/quick/letter" in read, "kl/coef" in read
        (True, True, False)
        """
        beginnings = tuple(name.removesuffix("*") for name in names if name.endswith("/*"))
        return cls(frozenset(name for name in names if not name.endswith("/*")), beginnings)

    def __contains__(self, name: str) -> bool:
        return name in self.names or name.startswith(self.beginnings)


def trend(values: Sequence[float]) -> float:
    """t statistic of the least-squares slope over equal steps; 0 for fewer than four values, ±inf for a perfect line.

    Neighbouring steps share a policy, so residuals are autocorrelated: with a lag-1 autocorrelation r > 0, n values are
    worth n (1 - r) / (1 + r), and t is smaller by the root of that share.

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
    residuals = [y - mean - slope * (x - centre) for x, y in enumerate(values)]
    squares = sum(residual * residual for residual in residuals)
    # The residuals of a perfect line are rounding errors and no noise.
    if squares <= 1e-24 * sum(y * y for y in values):
        return math.copysign(math.inf, slope) if slope else 0.0
    autocorrelation = max(0.0, sum(a * b for a, b in pairwise(residuals)) / squares)
    return slope / math.sqrt(squares / (n - 2) / spread) * math.sqrt((1 - autocorrelation) / (1 + autocorrelation))


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of one value around a slowly changing trend, from the median of neighbours' differences.

    A difference of neighbours has twice the variance of the noise and hardly any trend; the median is robust to jumps.
    Where more than half of the differences are 0 (a score at its ceiling), their root mean square is taken instead.
    Of 1, 3, 2, 4: median difference 2, 1.4826 * 2 / sqrt(2).

    >>> round(noise_of([1.0, 3.0, 2.0, 4.0]), 4), round(noise_of([1.0, 1.0, 1.0, 0.0]), 4)
    (2.0967, 0.4082)
    """
    differences = [abs(b - a) for a, b in pairwise(values)]
    middle = median(differences)
    spread = NORMAL * middle if middle > 0 else math.sqrt(fmean(difference * difference for difference in differences))
    return spread / math.sqrt(2)


def best_before(values: Sequence[float], last: int = 5) -> float:
    """The best mean of `last` neighbours among all but the `last` ones; there are at least twice as many values.

    >>> best_before([1.0, 4.0, 3.0, 9.0, 9.0], last=2)
    3.5
    """
    return max(fmean(values[at : at + last]) for at in range(len(values) - 2 * last + 1))
