"""The laws of Gao et al. 2022 as least squares: R(d) = start + d (α − β ln d) of RL, start + d (α − β d) of best-of-N.

d is √KL. The paper's gold score is 0 at d = 0; here that zero is unknown, so it is fitted too, as `start`. Both laws
are linear in their three parameters. Left out: any error in KL itself.
Shape letters: N points, 3 parameters, B bootstrap draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kedge.core.stats import Z95

Kind = Literal["rl", "best_of_n"]
Interval = tuple[float, float]
Vector = NDArray[np.float64]
Rows = NDArray[np.intp]

LAG_Z = 2.33
"""Standard errors above 0, one-sided 1 %, of the correlation of neighbouring residuals beyond which the law does not
hold."""
GOOD_R2 = 0.98
"""A law that explains so much of the variance holds all the same: with little noise, the smallest departure from it has
residuals that go together."""
MOST_LAG = 0.9
"""Above it, as many points as a run has say nothing of how long residuals last."""
DRAWS = 1000
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The law with its parameters, and the range of d on which they were fitted."""

    kind: Kind
    start: float
    alpha: float
    beta: float
    r2: float
    """Share of the variance of gold that the law explains there; 0 where gold does not vary."""
    noise: float
    """Standard deviation of the residuals."""
    num_points: int
    d_range: Interval

    def predicted(self, d: float) -> float:
        """The gold score that the law gives at d = √KL."""
        slope = self.alpha - self.beta * (math.log(d) if self.kind == "rl" else d) if d > 0 else 0.0
        return self.start + d * slope


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The law, fitted to points, with what is known of its errors."""

    law: Law
    covariance: Vector
    """Of start, α, β."""
    widening: float
    """How much larger it is for residuals that last from one point of the run to the next."""
    lag: float
    """Correlation of the residuals of points that are neighbours in KL."""
    fitted_N: Vector
    residuals_N: Vector
    design_N3: Vector

    @property
    def intervals(self) -> list[Interval]:
        """Of start, α, β."""
        reach = t95(self.law.num_points - 3) * np.sqrt(np.diag(self.covariance))
        centres = (self.law.start, self.law.alpha, self.law.beta)
        return [(at - float(half), at + float(half)) for at, half in zip(centres, reach, strict=True)]

    @property
    def holds(self) -> bool:
        """By a one-sided test of `lag` against 0, whose standard error is 1 / √n; or by what the law explains."""
        return self.lag <= LAG_Z / math.sqrt(self.law.num_points) or self.law.r2 >= GOOD_R2

    @property
    def peak_interval(self) -> Interval | None:
        """Of the peak's KL by the delta method on its logarithm; None where the curve does not bend down."""
        law = self.law
        if law.beta <= 0 or (law.kind == "best_of_n" and law.alpha <= 0):
            return None
        centre, error = log_peak(law.kind, law.alpha, law.beta, self.covariance[1:, 1:])
        reach = t95(law.num_points - 3) * error
        return _exp(2 * (centre - reach)), _exp(2 * (centre + reach))

    def redrawn(self) -> Vector:
        """`parameters_B3` of a bootstrap: the law with other residuals of its own at each point, fitted again.

        Residuals are scaled so that the draws spread as the covariance says, which knows of the degrees of freedom and
        of what lasts from one point to the next, and by Student's t over the normal, for their number.
        """
        size = self.law.num_points
        rng = np.random.default_rng(_SEED)
        centred_N = self.residuals_N - self.residuals_N.mean()
        scale = math.sqrt(size / (size - 3) * self.widening) * t95(size - 3) / Z95
        return self.refitted(self.fitted_N + scale * centred_N[rng.integers(0, size, size=(DRAWS, size))])

    def refitted(self, gold_BN: Vector) -> Vector:
        """`parameters_B3` of other gold scores at the same points."""
        return gold_BN @ np.linalg.pinv(self.design_N3).T


def fit_law(d_N: Vector, gold_N: Vector, kind: Kind) -> Curve:
    """Ordinary least squares, over points in the order of the run."""
    design_N3 = _design(d_N, kind)
    parameters, covariance, residuals_N, widening = _least_squares(design_N3, gold_N)
    squares, around = float(residuals_N @ residuals_N), float(np.square(gold_N - gold_N.mean()).sum())
    # Rounding errors of points that lie on the curve are no residuals.
    is_exact = residuals_N.std() <= 1e-9 * gold_N.std()
    law = Law(
        kind=kind,
        start=float(parameters[0]),
        alpha=float(parameters[1]),
        beta=float(parameters[2]),
        r2=1 - squares / around if around > 0 else 0.0,
        noise=math.sqrt(squares / (len(d_N) - 3)),
        num_points=len(d_N),
        d_range=(float(d_N.min()), float(d_N.max())),
    )
    return Curve(
        law=law,
        covariance=covariance,
        widening=widening,
        lag=0.0 if is_exact else _lag_correlation(residuals_N[np.argsort(d_N, kind="stable")]),
        fitted_N=gold_N - residuals_N,
        residuals_N=residuals_N,
        design_N3=design_N3,
    )


def forecasts(
    d_N: Vector, gold_N: Vector, sizes_S: Rows, kind: Kind, *, ahead: int, noise: float
) -> tuple[Vector, Vector]:
    """`gold_SA` that the law predicts at the `ahead` points behind the first so many, as fitted to these, and `error_S`
    of their mean: that of the law and that of the measurements, each with at least this noise.

    Normal equations of all sizes at once, from sums that run along the points.
    """
    design_N3, centre = _design(d_N, kind), float(gold_N.mean())
    centred_N = gold_N - centre
    gram_S33 = np.cumsum(design_N3[:, :, None] * design_N3[:, None, :], axis=0)[sizes_S - 1]
    moment_S3 = np.cumsum(design_N3 * centred_N[:, None], axis=0)[sizes_S - 1]
    parameters_S3 = np.linalg.solve(gram_S33, moment_S3[:, :, None])[:, :, 0]
    squares_S = np.cumsum(centred_N * centred_N)[sizes_S - 1] - (parameters_S3 * moment_S3).sum(axis=1)
    variance_S = np.maximum(squares_S / (sizes_S - 3), noise * noise)
    next_SA3 = design_N3[sizes_S[:, None] + np.arange(ahead)]
    mean_S3 = next_SA3.mean(axis=1)
    of_law_S = (mean_S3 * np.linalg.solve(gram_S33, mean_S3[:, :, None])[:, :, 0]).sum(axis=1)
    expected_SA = (next_SA3 * parameters_S3[:, None, :]).sum(axis=2) + centre
    return expected_SA, np.sqrt(variance_S * (of_law_S + 1 / ahead))


def peaks_of(parameters_B3: Vector, kind: Kind) -> Vector:
    """The KL of the peak for each row of start, α, β: ∞ where the curve does not bend, 0 where it falls from d = 0.

    >>> peaks_of(np.array([[0.0, 1.0, 0.5], [0.0, 1.0, -0.1], [0.0, -1.0, 0.5]]), "best_of_n").tolist()
    [1.0, inf, 0.0]
    """
    alpha_B, beta_B = parameters_B3[:, 1], parameters_B3[:, 2]
    bends_B = beta_B > 0
    ratio_B = alpha_B / np.where(bends_B, beta_B, 1.0)
    with np.errstate(over="ignore"):
        peak_B = np.exp(2 * (ratio_B - 1)) if kind == "rl" else np.square(np.maximum(ratio_B, 0.0) / 2)
    return np.where(bends_B, peak_B, math.inf)


def middle_of(draws_B: Vector) -> Interval:
    """The middle 95 % of draws, some of which may be infinite."""
    low, high = np.quantile(draws_B, (0.025, 0.975), method="nearest")
    return float(low), float(high)


def log_peak(kind: Kind, alpha: float, beta: float, covariance: Vector) -> tuple[float, float]:
    """ln d at the peak, and its standard error. R' = 0 at ln d = α/β − 1 for RL, at d = α / 2β for best-of-N."""
    if kind == "rl":
        centre, gradient = alpha / beta - 1, np.array([1 / beta, -alpha / beta**2])
    else:
        centre, gradient = math.log(alpha / (2 * beta)), np.array([1 / alpha, -1 / beta])
    return centre, math.sqrt(float(gradient @ covariance @ gradient))


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's t (Abramowitz and Stegun 1964, 26.7.5), good to 3 digits from 9 degrees up.

    >>> round(t95(9), 3), round(t95(30), 3)
    (2.262, 2.042)
    """
    z = Z95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _design(d_N: Vector, kind: Kind) -> Vector:
    bend_N = np.where(d_N > 0, d_N * np.log(np.where(d_N > 0, d_N, 1.0)), 0.0) if kind == "rl" else d_N * d_N
    return np.stack([np.ones_like(d_N), d_N, -bend_N], axis=1)


def _least_squares(design_N3: Vector, target_N: Vector) -> tuple[Vector, Vector, Vector, float]:
    """The solution, its covariance σ² (XᵀX)⁻¹, the residuals in the order of the run, and what widens the covariance.

    Neighbouring points share a policy, so residuals are autocorrelated. With a lag-1 autocorrelation r > 0, n points
    are worth n (1 − r) / (1 + r): the covariance grows by the inverse. Residuals of a fit show too little of it: with
    three parameters what is seen is r less about (3 + 5 r) / n (as Marriott and Pope 1954 have it for a mean).
    """
    solution = np.asarray(np.linalg.lstsq(design_N3, target_N, rcond=None)[0], dtype=np.float64)
    residuals_N = target_N - design_N3 @ solution
    variance = float(residuals_N @ residuals_N) / (len(target_N) - design_N3.shape[1])
    seen = _lag_correlation(residuals_N)
    lag = min(max(0.0, seen + (3 + 5 * seen) / len(target_N)), MOST_LAG)
    widening = (1 + lag) / (1 - lag)
    return solution, np.linalg.inv(design_N3.T @ design_N3) * variance * widening, residuals_N, widening


def _lag_correlation(residuals_N: Vector) -> float:
    squares = float(residuals_N @ residuals_N)
    return float(residuals_N[1:] @ residuals_N[:-1]) / squares if squares > 0 else 0.0


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
