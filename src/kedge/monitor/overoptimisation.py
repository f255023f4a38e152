"""Where more optimisation begins to hurt: gold scores against √KL, fitted by the laws of Gao et al. 2022.

With d = √KL, RL gives R(d) = d (α − β ln d) and best-of-N gives R(d) = d (α − β d). The paper's gold score is 0 at
d = 0; here that zero is unknown, so it is fitted too, as `start`. Left out: any error in KL itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kedge.core.errors import DataError
from kedge.core.stats import Z95
from kedge.monitor.detectors.watchdog import noise_of

Kind = Literal["rl", "best_of_n"]
Interval = tuple[float, float]
Vector = NDArray[np.float64]

MIN_POINTS = 12
"""Three numbers are fitted; nine degrees of freedom leave a t quantile of 2.3 instead of 2."""
MOST_POINTS = 1000
"""Of longer runs, neighbouring points are averaged: a fit of a hundred thousand says no more and takes seconds."""
MIN_SPAN = 2.0
"""The largest d over the smallest: over less than a doubling, a bent line and a straight one look alike."""
MAX_REACH = 4.0
"""The peak's d over the largest d of the run: beyond that the peak is an extrapolation far from any data."""

MAX_INTERVAL_RATIO = 2.0
"""Upper over lower end of the peak's interval up to which a run is stopped at the peak. The rule is applied after every
step, so a looser one stops many runs whose gold levels off and never falls."""

LAG_Z = 2.33
"""Standard errors above 0, one-sided 1 %, of the correlation of neighbouring residuals beyond which the law does not
hold."""
LOOKS = 5
"""Gold is compared by means of so many neighbouring measurements: of single ones, the luckiest would be the best."""
PEAK_Z, FALL_Z, STOP_Z = 1.25, 5.0, 8.0
"""Standard errors below the best mean within which a mean may be the peak as well, beyond which gold has fallen, and
beyond which a run is stopped: the best of many means is a lucky one, and the last rule is applied after every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPeak:
    """Where gold was best, by what was measured and no law."""

    kl: float
    kl_interval: Interval
    """From the lowest to the highest KL at which the mean of `LOOKS` neighbours is no more than `PEAK_Z` standard
    errors below the best."""
    gold: float
    gold_now: float
    """Mean of the last `LOOKS` points of the run."""
    kl_now: float
    """Of the last point."""
    fall: float
    """Standard errors by which `gold_now` is below the best."""

    @property
    def has_fallen(self) -> bool:
        return self.fall > FALL_Z

    def in_words(self) -> str:
        low, high = self.kl_interval
        if not self.has_fallen:
            return f"gold has not fallen from its best, {self.gold:.3g} at a KL of {self.kl:.3g} nats"
        return (
            f"gold was best at a KL of {self.kl:.3g} nats (between {low:.3g} and {high:.3g}), at {self.gold:.3g}, and "
            f"has fallen to {self.gold_now:.3g} at {self.kl_now:.3g} nats"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFit:
    """No curve was fitted, for this reason."""

    reason: str
    observed: ObservedPeak | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted curve. Intervals are 95 %, from the least-squares covariance with Student's t, widened for
    autocorrelated residuals; that of the peak by the delta method on ln KL.
    """

    kind: Kind
    alpha: float
    alpha_interval: Interval
    beta: float
    beta_interval: Interval
    start: float
    start_interval: Interval
    peak_kl: float
    peak_kl_interval: Interval
    noise: float
    """Standard deviation of the residuals."""
    num_points: int
    num_left_out: int
    """Points with a negative or non-finite KL or score."""
    kl: float
    """Of the last point: where the run is now."""
    holds_until: float | None = None
    """The largest KL up to which the law was fitted, where it does not hold beyond; None where it holds throughout."""
    observed: ObservedPeak | None = None

    def predicted(self, d: float) -> float:
        """The gold score that the curve gives at d = √KL."""
        slope = self.alpha - self.beta * (math.log(d) if self.kind == "rl" else d) if d > 0 else 0.0
        return self.start + d * slope

    @property
    def is_past_peak(self) -> bool:
        return self.kl > self.peak_kl

    @property
    def kl_left(self) -> float:
        """Nats from here to the peak; below zero past it."""
        return self.peak_kl - self.kl

    @property
    def gold_left(self) -> float:
        """Gold that the curve predicts to gain until the peak; past the peak, what was lost since."""
        return self.predicted(math.sqrt(self.peak_kl)) - self.predicted(math.sqrt(self.kl))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedPeak:
    """A peak of the gold score that the run has behind it."""

    kl: float
    kl_interval: Interval
    kl_now: float
    is_predicted: bool
    """By the fitted law; else gold was seen to fall."""


def fit(kl: Sequence[float], gold: Sequence[float], *, kind: Kind) -> Fit | NoFit:
    """Fit the law of `kind` to points in the order of the run's steps, or say why not.

    The curve is linear in its three parameters, so this is one ordinary least-squares problem. Where the residuals of
    points that are neighbours in KL go together, the points are not those of the law: the furthest are left out until
    it holds, so that what came after a collapse does not decide where the peak was.
    """
    if len(kl) != len(gold):
        raise DataError(f"{len(kl)} KL values for {len(gold)} gold scores; give one score for each KL")
    usable = [(k, g) for k, g in zip(kl, gold, strict=True) if math.isfinite(k) and math.isfinite(g) and k >= 0]
    d = np.sqrt(_thinned([k for k, _ in usable]))
    scores = _thinned([g for _, g in usable])
    observed = observed_peak(d * d, scores)
    if refusal := _refusal(d):
        return NoFit(reason=refusal, observed=observed)
    curve = _largest_range(d, scores, kind, observed)
    if curve is None:
        return NoFit(reason="the law fits no part of the run: its residuals go together at every KL", observed=observed)
    holds_until = None if curve.num_points == len(d) else curve.furthest**2
    if reason := _no_peak(curve, holds_until, observed):
        return NoFit(reason=reason, observed=observed)
    start, alpha, beta = (float(parameter) for parameter in curve.parameters)
    centre, _ = _log_peak(kind, alpha, beta, curve.covariance[1:, 1:])
    interval = curve.peak_interval
    assert interval is not None  # `_no_peak` gives its reason
    return Fit(
        kind=kind,
        alpha=alpha,
        alpha_interval=_around(alpha, curve.half_widths[1]),
        beta=beta,
        beta_interval=_around(beta, curve.half_widths[2]),
        start=start,
        start_interval=_around(start, curve.half_widths[0]),
        peak_kl=math.exp(2 * centre),
        peak_kl_interval=interval,
        noise=curve.noise,
        num_points=curve.num_points,
        num_left_out=len(kl) - len(usable),
        kl=usable[-1][0],
        holds_until=holds_until,
        observed=observed,
    )


def observed_peak(kl: Vector, gold: Vector) -> ObservedPeak | None:
    """Where gold was best, over points in the order of the run; None for fewer than twice `LOOKS` of them."""
    if len(kl) < 2 * LOOKS:
        return None
    order = np.argsort(kl, kind="stable")
    windows = np.lib.stride_tricks.sliding_window_view(order, LOOKS)
    means, centres = gold[windows].mean(axis=1), kl[windows].mean(axis=1)
    best = int(means.argmax())
    error = noise_of(gold[order].tolist()) * math.sqrt(2 / LOOKS)
    is_peak = means >= means[best] - PEAK_Z * error
    now = float(gold[-LOOKS:].mean())
    return ObservedPeak(
        kl=float(centres[best]),
        kl_interval=(float(centres[is_peak].min()), float(centres[is_peak].max())),
        gold=float(means[best]),
        gold_now=now,
        kl_now=float(kl[-1]),
        fall=_ratio(float(means[best]) - now, error),
    )


def should_stop(fit: Fit | NoFit, kl: float) -> bool:
    """Whether a run at `kl` has reached the predicted peak: never without a fit, nor while its interval is wide."""
    if isinstance(fit, NoFit):
        return False
    low, high = fit.peak_kl_interval
    return kl >= fit.peak_kl and high <= MAX_INTERVAL_RATIO * low


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """The law, fitted to the points of a range."""

    kind: Kind
    parameters: Vector
    """start, α, β."""
    covariance: Vector
    noise: float
    num_points: int
    furthest: float
    """The largest d of the range."""
    lag: float
    """Correlation of the residuals of points that are neighbours in KL."""

    @property
    def half_widths(self) -> Vector:
        return _t95(self.num_points - 3) * np.sqrt(np.diag(self.covariance))

    @property
    def holds(self) -> bool:
        """By a one-sided test of `lag` against 0, whose standard error is 1 / √n."""
        return self.lag <= LAG_Z / math.sqrt(self.num_points)

    @property
    def peak_interval(self) -> Interval | None:
        """Of the peak's KL; None where the curve does not bend down."""
        _, alpha, beta = (float(parameter) for parameter in self.parameters)
        if beta <= 0 or (self.kind == "best_of_n" and alpha <= 0):
            return None
        centre, error = _log_peak(self.kind, alpha, beta, self.covariance[1:, 1:])
        reach = _t95(self.num_points - 3) * error
        return _exp(2 * (centre - reach)), _exp(2 * (centre + reach))

    def agrees(self, observed: ObservedPeak | None) -> bool:
        """Whether its peak may be the one that gold was seen to fall from."""
        if observed is None or not observed.has_fallen or self.peak_interval is None:
            return True
        return self.peak_interval[0] <= observed.kl_interval[1] and observed.kl_interval[0] <= self.peak_interval[1]


def _largest_range(d: Vector, scores: Vector, kind: Kind, observed: ObservedPeak | None) -> _Curve | None:
    """The law on the largest range from KL 0 on in which it holds; points are left out by twentieths."""
    order = np.argsort(d, kind="stable")
    size = len(d)
    while size >= MIN_POINTS and not _refusal(d[order[:size]]):
        rows = np.sort(order[:size])
        curve = _fitted(d[rows], scores[rows], kind)
        if curve.holds and curve.agrees(observed):
            return curve
        size -= max(1, size // 20)
    return None


def _fitted(d: Vector, scores: Vector, kind: Kind) -> _Curve:
    bend = np.where(d > 0, d * np.log(np.where(d > 0, d, 1.0)), 0.0) if kind == "rl" else d * d
    design = np.stack([np.ones_like(d), d, -bend], axis=1)
    parameters, covariance, residuals = _least_squares(design, scores)
    return _Curve(
        kind=kind,
        parameters=parameters,
        covariance=covariance,
        noise=math.sqrt(float(residuals @ residuals) / (len(d) - 3)),
        num_points=len(d),
        furthest=float(d.max()),
        # Rounding errors of points that lie on the curve are no residuals.
        lag=_lag_correlation(residuals[np.argsort(d, kind="stable")]) if residuals.std() > 1e-9 * scores.std() else 0.0,
    )


def _no_peak(curve: _Curve, holds_until: float | None, observed: ObservedPeak | None) -> str | None:
    """Why the curve has no peak that could be reported; None where it has one."""
    _, alpha, beta = (float(parameter) for parameter in curve.parameters)
    beyond = f"the law does not fit beyond a KL of {holds_until:.3g} nats" if holds_until is not None else ""
    if beta - curve.half_widths[2] <= 0:
        unsure = f"β is {beta:.3g} ± {curve.half_widths[2]:.2g}, not distinguishable from 0"
        if beyond:
            return f"{beyond}, and up to there does not bend down: {unsure}"
        if observed and observed.has_fallen:
            return f"gold has fallen otherwise than by the law: {unsure}"
        return f"gold does not bend down yet: {unsure}"
    if curve.kind == "best_of_n" and alpha <= 0:
        return f"gold falls from the start (α is {alpha:.3g}): there is no peak to look for"
    centre, _ = _log_peak(curve.kind, alpha, beta, curve.covariance[1:, 1:])
    if beyond and centre > math.log(curve.furthest):
        return f"{beyond}, and up to there has no peak"
    if centre > math.log(MAX_REACH * curve.furthest):
        return (
            f"the peak would be beyond {MAX_REACH**2:g} times the largest KL seen ({curve.furthest**2:.3g} nats), "
            "too far to predict"
        )
    return None


def _thinned(values: Sequence[float]) -> Vector:
    """The values; of more than `MOST_POINTS`, means of so many neighbours in the run that no more are left."""
    width = -(-len(values) // MOST_POINTS)
    column = np.array(values, dtype=np.float64)
    if width <= 1:
        return column
    whole = len(column) // width * width
    return column[:whole].reshape(-1, width).mean(axis=1)


def _refusal(d: Vector) -> str | None:
    if len(d) < MIN_POINTS:
        return f"{len(d)} usable points; {MIN_POINTS} are needed"
    if len(np.unique(d)) < MIN_POINTS:
        return f"{len(np.unique(d))} different values of KL; {MIN_POINTS} are needed"
    if d.max() < MIN_SPAN * d.min():
        low, high = d.min() ** 2, d.max() ** 2
        return f"KL only went from {low:.3g} to {high:.3g} nats; √KL must at least grow {MIN_SPAN:g}-fold"
    return None


def _least_squares(design: Vector, target: Vector) -> tuple[Vector, Vector, Vector]:
    """The solution, its covariance σ² (XᵀX)⁻¹, and the residuals, in the order of the run.

    Neighbouring points share a policy, so residuals are autocorrelated. With a lag-1 autocorrelation r > 0, n points
    are worth n (1 − r) / (1 + r): the covariance grows by the inverse.
    """
    solution = np.asarray(np.linalg.lstsq(design, target, rcond=None)[0], dtype=np.float64)
    residuals = target - design @ solution
    variance = float(residuals @ residuals) / (len(target) - design.shape[1])
    lag = max(0.0, _lag_correlation(residuals))
    covariance = np.linalg.inv(design.T @ design) * variance * (1 + lag) / (1 - lag)
    return solution, covariance, residuals


def _lag_correlation(residuals: Vector) -> float:
    squares = float(residuals @ residuals)
    return float(residuals[1:] @ residuals[:-1]) / squares if squares > 0 else 0.0


def _log_peak(kind: Kind, alpha: float, beta: float, covariance: Vector) -> tuple[float, float]:
    """ln d at the peak, and its standard error. R' = 0 at ln d = α/β − 1 for RL, at d = α / 2β for best-of-N."""
    if kind == "rl":
        centre, gradient = alpha / beta - 1, np.array([1 / beta, -alpha / beta**2])
    else:
        centre, gradient = math.log(alpha / (2 * beta)), np.array([1 / alpha, -1 / beta])
    return centre, math.sqrt(float(gradient @ covariance @ gradient))


def _t95(freedom: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 1964, 26.7.5), good to 3 digits from 9 degrees up.

    >>> round(_t95(9), 3), round(_t95(30), 3)
    (2.262, 2.042)
    """
    z = Z95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _ratio(difference: float, error: float) -> float:
    """Without any noise, any difference is beyond all errors."""
    return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0


def _around(centre: float, half: float) -> Interval:
    return centre - float(half), centre + float(half)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def passed_peak(metrics: Sequence[Mapping[str, Any]]) -> PassedPeak | None:
    """The peak of the gold score, where the run is at or past it by the fit, or where gold has fallen from it; None
    while neither is so."""
    measured = [record for record in metrics if "gold/mean" in record]
    if not measured:
        return None
    kl = [float(record["kl/mean"]) for record in measured]
    curve = fit(kl, [float(record["gold/mean"]) for record in measured], kind="rl")
    if isinstance(curve, Fit) and should_stop(curve, kl[-1]):
        return PassedPeak(kl=curve.peak_kl, kl_interval=curve.peak_kl_interval, kl_now=kl[-1], is_predicted=True)
    observed = curve.observed
    if observed is None or observed.fall <= STOP_Z or kl[-1] <= observed.kl_interval[1]:
        return None
    return PassedPeak(kl=observed.kl, kl_interval=observed.kl_interval, kl_now=kl[-1], is_predicted=False)
