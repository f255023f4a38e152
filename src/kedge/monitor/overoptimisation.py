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

Kind = Literal["rl", "best_of_n"]
Interval = tuple[float, float]
Vector = NDArray[np.float64]

MIN_POINTS = 12
"""Three numbers are fitted; nine degrees of freedom leave a t quantile of 2.3 instead of 2."""
MIN_SPAN = 2.0
"""The largest d over the smallest: over less than a doubling, a bent line and a straight one look alike."""
MAX_REACH = 4.0
"""The peak's d over the largest d of the run: beyond that the peak is an extrapolation far from any data."""

MAX_INTERVAL_RATIO = 2.0
"""Upper over lower end of the peak's interval up to which a run is stopped at the peak. The rule is applied after every
step, so a looser one stops many runs whose gold levels off and never falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFit:
    """No curve was fitted, for this reason."""

    reason: str


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


def fit(kl: Sequence[float], gold: Sequence[float], *, kind: Kind) -> Fit | NoFit:
    """Fit the law of `kind` to points in the order of the run's steps, or say why not.

    The curve is linear in its three parameters, so this is one ordinary least-squares problem.
    """
    if len(kl) != len(gold):
        raise DataError(f"{len(kl)} KL values for {len(gold)} gold scores; give one score for each KL")
    usable = [(k, g) for k, g in zip(kl, gold, strict=True) if math.isfinite(k) and math.isfinite(g) and k >= 0]
    d = np.sqrt(np.array([k for k, _ in usable], dtype=np.float64))
    if refusal := _refusal(d):
        return refusal
    bend = np.where(d > 0, d * np.log(np.where(d > 0, d, 1.0)), 0.0) if kind == "rl" else d * d
    design = np.stack([np.ones_like(d), d, -bend], axis=1)
    parameters, covariance, noise = _least_squares(design, np.array([g for _, g in usable], dtype=np.float64))
    start, alpha, beta = (float(parameter) for parameter in parameters)
    half_widths = _t95(len(d) - 3) * np.sqrt(np.diag(covariance))
    if beta - half_widths[2] <= 0:
        return NoFit(
            reason=f"gold does not bend down yet: β is {beta:.3g} ± {half_widths[2]:.2g}, not distinguishable from 0"
        )
    if kind == "best_of_n" and alpha <= 0:
        return NoFit(reason=f"gold falls from the start (α is {alpha:.3g}): there is no peak to look for")
    centre, error = _log_peak(kind, alpha, beta, covariance[1:, 1:])
    if centre > math.log(MAX_REACH * d.max()):
        return NoFit(
            reason=f"the peak would be beyond {MAX_REACH**2:g} times the largest KL seen ({d.max() ** 2:.3g} nats), "
            "too far to predict"
        )
    reach = _t95(len(d) - 3) * error
    return Fit(
        kind=kind,
        alpha=alpha,
        alpha_interval=_around(alpha, half_widths[1]),
        beta=beta,
        beta_interval=_around(beta, half_widths[2]),
        start=start,
        start_interval=_around(start, half_widths[0]),
        peak_kl=math.exp(2 * centre),
        peak_kl_interval=(_exp(2 * (centre - reach)), _exp(2 * (centre + reach))),
        noise=noise,
        num_points=len(d),
        num_left_out=len(kl) - len(d),
        kl=usable[-1][0],
    )


def should_stop(fit: Fit | NoFit, kl: float) -> bool:
    """Whether a run at `kl` has reached the predicted peak: never without a fit, nor while its interval is wide."""
    if isinstance(fit, NoFit):
        return False
    low, high = fit.peak_kl_interval
    return kl >= fit.peak_kl and high <= MAX_INTERVAL_RATIO * low


def _refusal(d: Vector) -> NoFit | None:
    if len(d) < MIN_POINTS:
        return NoFit(reason=f"{len(d)} usable points; {MIN_POINTS} are needed")
    if len(np.unique(d)) < MIN_POINTS:
        return NoFit(reason=f"{len(np.unique(d))} different values of KL; {MIN_POINTS} are needed")
    if d.max() < MIN_SPAN * d.min():
        low, high = d.min() ** 2, d.max() ** 2
        return NoFit(reason=f"KL only went from {low:.3g} to {high:.3g} nats; √KL must at least grow {MIN_SPAN:g}-fold")
    return None


def _least_squares(design: Vector, target: Vector) -> tuple[Vector, Vector, float]:
    """The solution, its covariance σ² (XᵀX)⁻¹, and σ.

    Neighbouring points share a policy, so residuals are autocorrelated. With a lag-1 autocorrelation r > 0, n points
    are worth n (1 − r) / (1 + r): the covariance grows by the inverse.
    """
    solution = np.asarray(np.linalg.lstsq(design, target, rcond=None)[0], dtype=np.float64)
    residuals = target - design @ solution
    squares = float(residuals @ residuals)
    variance = squares / (len(target) - design.shape[1])
    autocorrelation = max(0.0, float(residuals[1:] @ residuals[:-1]) / squares) if squares > 0 else 0.0
    covariance = np.linalg.inv(design.T @ design) * variance * (1 + autocorrelation) / (1 - autocorrelation)
    return solution, covariance, math.sqrt(variance)


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


def _around(centre: float, half: float) -> Interval:
    return centre - float(half), centre + float(half)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def passed_peak(metrics: Sequence[Mapping[str, Any]]) -> Fit | None:
    """The fit, where it says that the gold score is at or past its predicted peak; None while it does not."""
    measured = [record for record in metrics if "gold/mean" in record]
    if not measured:
        return None
    kl = [float(record["kl/mean"]) for record in measured]
    curve = fit(kl, [float(record["gold/mean"]) for record in measured], kind="rl")
    return curve if isinstance(curve, Fit) and should_stop(curve, kl[-1]) else None
