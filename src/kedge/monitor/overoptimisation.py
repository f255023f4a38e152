"""Where more optimisation begins to hurt: gold scores against √KL, fitted by the laws of Gao et al. 2022.

The law is fitted where it holds and what became of gold is said in words: not bent yet, a peak, a collapse after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kedge.core.errors import DataError
from kedge.monitor.detectors.watchdog import noise_of
from kedge.monitor.gold_law import (
    Curve,
    Interval,
    Kind,
    Law,
    Rows,
    Vector,
    fit_law,
    forecasts,
    log_peak,
    middle_of,
    peaks_of,
)
from kedge.monitor.gold_peak import FALL_Z, LOOKS, ObservedPeak, observed_peak

Outcome = Literal["too_few_points", "flat", "not_bent", "falls", "peak", "collapsed", "fallen", "no_law"]
"""What gold does over √KL. `falls`: from the start. `fallen`: from a peak that was seen, otherwise than by the law.
`no_law`: none of them, and the law fits no part of the points."""

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

STOP_Z = 8.0
"""Standard errors of a fall beyond which a run is stopped: the rule is applied after every step."""
COLLAPSE_SHARE = 0.5
"""A collapse takes away more than this share of all that gold had gained, beside being beyond `FALL_Z` standard errors:
a law that is slightly wrong is no collapse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFit:
    """No peak of a fitted curve, for this reason."""

    outcome: Outcome
    reason: str
    observed: ObservedPeak | None = None
    law: Law | None = None
    """The law as it was fitted, where it has no peak that could be told."""
    collapse_kl: float | None = None
    """Where gold broke away from the law, downwards."""

    def in_words(self) -> str:
        """What became of gold, with d = √KL."""
        best = f"a peak at {_at(self.observed.kl, self.observed.kl_interval)}" if self.observed else "its best"
        match self.outcome:
            case "too_few_points":
                return f"too few points: {self.reason}"
            case "collapsed" if self.collapse_kl is not None:
                return (
                    f"gold collapsed at d = {math.sqrt(self.collapse_kl):.3g} after {best} as measured: {self.reason}"
                )
            case "fallen" if self.observed is not None:
                return f"gold has fallen after {best} as measured: {self.reason}"
            case _:
                return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted curve. Intervals are 95 %: of the parameters from the least-squares covariance with Student's t,
    widened for autocorrelated residuals; of the peak by a bootstrap, of resampled prompts where those were given, else
    of residuals. With resampled prompts, all of them are of these.
    """

    law: Law
    alpha_interval: Interval
    beta_interval: Interval
    start_interval: Interval
    peak_kl: float
    peak_kl_interval: Interval
    num_left_out: int
    """Points with a negative or non-finite KL or score."""
    kl: float
    """Of the last point: where the run is now."""
    holds_until: float | None = None
    """The largest KL up to which the law was fitted, where it does not hold beyond; None where it holds throughout."""
    collapse_kl: float | None = None
    """Where gold broke away from the law, downwards."""
    observed: ObservedPeak | None = None

    @property
    def outcome(self) -> Outcome:
        return "peak" if self.collapse_kl is None else "collapsed"

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
        return self.law.predicted(math.sqrt(self.peak_kl)) - self.law.predicted(math.sqrt(self.kl))

    def in_words(self) -> str:
        """What became of gold, with d = √KL."""
        low, high = self.law.d_range
        about = f"the law fits from d = {low:.3g} to {high:.3g}, R² = {self.law.r2:.3f}"
        peak = _at(self.peak_kl, self.peak_kl_interval)
        if self.collapse_kl is not None:
            return f"gold collapsed at d = {math.sqrt(self.collapse_kl):.3g} after a peak at {peak}; {about}"
        beyond = "" if self.holds_until is None else ", and not beyond"
        if self.observed is not None and self.observed.has_fallen:
            bends = "gold bends and has fallen, with its peak"
        elif self.peak_kl <= high * high:
            bends = "gold bends, with a peak of the law"
        else:
            bends = "gold bends, with a peak predicted"
        return f"{bends} at {peak}; {about}{beyond}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedPeak:
    """A peak of the gold score that the run has behind it."""

    kl: float
    kl_interval: Interval
    kl_now: float
    is_predicted: bool
    """By the fitted law; else gold was seen to fall."""


def fit(
    kl: Sequence[float], gold: Sequence[float], *, kind: Kind, resampled: Sequence[Sequence[float]] | None = None
) -> Fit | NoFit:
    """Fit the law of `kind` to points in the order of the run's steps, or say why not.

    Where the residuals of points that are neighbours in KL go together, and more than a fiftieth of the variance is
    theirs, the points are not those of the law: the furthest are left out until it holds, so that what came after a
    collapse does not decide where the peak was. `resampled` are the same gold scores from resampled prompts, one row a
    bootstrap draw, where those are at hand: points of best-of-N are of the same answers, and their residuals no noise.
    """
    if len(kl) != len(gold):
        raise DataError(f"{len(kl)} KL values for {len(gold)} gold scores; give one score for each KL")
    usable = [at for at in range(len(kl)) if math.isfinite(kl[at]) and math.isfinite(gold[at]) and kl[at] >= 0]
    d_N = np.sqrt(_thinned(np.array([kl[at] for at in usable], dtype=np.float64)))
    gold_N = _thinned(np.array([gold[at] for at in usable], dtype=np.float64))
    observed = observed_peak(d_N * d_N, gold_N)
    if refusal := _refusal(d_N):
        return NoFit(outcome="too_few_points", reason=refusal, observed=observed)
    break_d, collapse_kl = _collapse(d_N, gold_N, kind, observed) or (math.inf, None)
    rows = _largest_range(d_N, gold_N, np.flatnonzero(d_N < break_d), kind, observed)
    if rows is None:
        reason = "the law fits no part of the run: its residuals go together at every KL"
        outcome = _downwards(collapse_kl, observed) or "no_law"
        return NoFit(outcome=outcome, reason=reason, observed=observed, collapse_kl=collapse_kl)
    curve = fit_law(d_N[rows], gold_N[rows], kind)
    if resampled is None:
        draws_B3 = curve.redrawn()
    else:
        draws_B3 = curve.refitted(_thinned(np.array(resampled, dtype=np.float64)[:, usable])[:, rows])
    # Without resampled prompts a covariance knows more than draws do: few residuals have short tails.
    spans = curve.intervals if resampled is None else [middle_of(draws_B) for draws_B in draws_B3.T]
    holds_until = None if len(rows) == len(d_N) else curve.law.d_range[1] ** 2
    peakless = _no_peak(curve, draws_B3, spans[2], holds_until, collapse_kl, observed)
    if peakless is not None:
        return peakless
    return Fit(
        law=curve.law,
        start_interval=spans[0],
        alpha_interval=spans[1],
        beta_interval=spans[2],
        peak_kl=math.exp(2 * _log_peak_of(curve)),
        peak_kl_interval=middle_of(peaks_of(draws_B3, kind)),
        num_left_out=len(kl) - len(usable),
        kl=kl[usable[-1]],
        holds_until=holds_until,
        collapse_kl=collapse_kl,
        observed=observed,
    )


def should_stop(fit: Fit | NoFit, kl: float) -> bool:
    """Whether a run at `kl` has reached the predicted peak: never without a fit, nor while its interval is wide."""
    if isinstance(fit, NoFit):
        return False
    low, high = fit.peak_kl_interval
    return kl >= fit.peak_kl and high <= MAX_INTERVAL_RATIO * low


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


def _collapse(d_N: Vector, gold_N: Vector, kind: Kind, observed: ObservedPeak | None) -> tuple[float, float] | None:
    """The d before which the law may be fitted, and the KL at which gold broke away from it; None where it did not.

    It broke away where the mean of the next `LOOKS` points is below the best mean so far, and below what the law as
    fitted to all points before them predicts: by more than `FALL_Z` standard errors, and by more than `COLLAPSE_SHARE`
    of what gold had gained.
    """
    if observed is None or not observed.has_fallen:
        return None
    order = np.argsort(d_N, kind="stable")
    d_N, gold_N = d_N[order], gold_N[order]
    means = np.convolve(gold_N, np.full(LOOKS, 1 / LOOKS), mode="valid")
    sizes_S = np.arange(MIN_POINTS, len(d_N) - LOOKS + 1)
    sizes_S = sizes_S[[_refusal(d_N[:size]) is None for size in sizes_S]]
    if not len(sizes_S):
        return None
    expected_SA, error_S = forecasts(d_N, gold_N, sizes_S, kind, ahead=LOOKS, noise=noise_of(gold_N.tolist()))
    below_SA = expected_SA - gold_N[sizes_S[:, None] + np.arange(LOOKS)]
    below_S, best_S = below_SA.mean(axis=1), np.maximum.accumulate(means)[sizes_S - LOOKS]
    is_broken_S = (means[sizes_S] < best_S) & (below_S > FALL_Z * error_S)
    is_broken_S &= below_S > COLLAPSE_SHARE * (best_S - means[0])
    if not is_broken_S.any():
        return None
    first = int(is_broken_S.argmax())
    # The five may begin before the fall: the first of them that is as low as their mean is after it.
    low = int((below_SA[first] >= below_S[first]).argmax())
    return float(d_N[sizes_S[first]]), float(d_N[sizes_S[first] + low] ** 2)


def _downwards(collapse_kl: float | None, observed: ObservedPeak | None) -> Outcome | None:
    """How gold went down; None where it did not."""
    if collapse_kl is not None:
        return "collapsed"
    if observed is None or not observed.has_fallen:
        return None
    return "falls" if observed.is_at_start else "fallen"


def _largest_range(d_N: Vector, gold_N: Vector, rows: Rows, kind: Kind, observed: ObservedPeak | None) -> Rows | None:
    """Of `rows`, those of the largest range from KL 0 on in which the law holds; they are left out by twentieths."""
    order = rows[np.argsort(d_N[rows], kind="stable")]
    size = len(order)
    while size >= MIN_POINTS and not _refusal(d_N[order[:size]]):
        within = np.sort(order[:size])
        curve = fit_law(d_N[within], gold_N[within], kind)
        if curve.holds and _agrees(curve, observed):
            return within
        size -= max(1, size // 20)
    return None


def _agrees(curve: Curve, observed: ObservedPeak | None) -> bool:
    """Whether the peak of the curve may be the one that gold was seen to fall from."""
    interval = curve.peak_interval
    if observed is None or not observed.has_fallen or interval is None:
        return True
    return interval[0] <= observed.kl_interval[1] and observed.kl_interval[0] <= interval[1]


def _no_peak(
    curve: Curve,
    draws_B3: Vector,
    beta_interval: Interval,
    holds_until: float | None,
    collapse_kl: float | None,
    observed: ObservedPeak | None,
) -> NoFit | None:
    """Why the curve has no peak that could be reported; None where it has one."""
    law = curve.law
    down = _downwards(collapse_kl, observed) or "not_bent"
    beyond = f"the law does not fit beyond a KL of {holds_until:.3g} nats" if holds_until is not None else ""

    def because(outcome: Outcome, reason: str) -> NoFit:
        return NoFit(outcome=outcome, reason=reason, observed=observed, law=law, collapse_kl=collapse_kl)

    if beta_interval[0] <= 0:
        unsure = f"β is {law.beta:.3g} ({beta_interval[0]:.2g} to {beta_interval[1]:.2g}), not shown to be above 0"
        if beyond:
            return because(down, f"{beyond}, and up to there does not bend down: {unsure}")
        if down != "not_bent":
            return because(down, f"gold has fallen otherwise than by the law: {unsure}")
        if _is_flat(curve, draws_B3):
            return because("flat", f"gold neither rises nor falls up to d = {law.d_range[1]:.3g}: {unsure}")
        return because("not_bent", f"gold does not bend down yet, up to d = {law.d_range[1]:.3g}: {unsure}")
    if law.kind == "best_of_n" and law.alpha <= 0:
        return because("falls", f"gold falls from the start (α is {law.alpha:.3g}): there is no peak to look for")
    centre = _log_peak_of(curve)
    if beyond and centre > math.log(law.d_range[1]):
        return because(down, f"{beyond}, and up to there has no peak")
    if centre > math.log(MAX_REACH * law.d_range[1]):
        furthest = f"{MAX_REACH**2:g} times the largest KL seen ({law.d_range[1] ** 2:.3g} nats)"
        return because("not_bent", f"the peak would be beyond {furthest}, too far to predict")
    return None


def _is_flat(curve: Curve, draws_B3: Vector) -> bool:
    """Whether the law may end where it began."""
    order = np.argsort(curve.design_N3[:, 1])
    low, high = middle_of(draws_B3 @ (curve.design_N3[order[-1]] - curve.design_N3[order[0]]))
    return low <= 0 <= high


def _log_peak_of(curve: Curve) -> float:
    return log_peak(curve.law.kind, curve.law.alpha, curve.law.beta, curve.covariance[1:, 1:])[0]


def _thinned(values: Vector) -> Vector:
    """The values along the last axis; of more than `MOST_POINTS`, means of so many neighbours in the run that no more
    are left."""
    size = values.shape[-1]
    width = -(-size // MOST_POINTS)
    if width <= 1:
        return values
    return values[..., : size // width * width].reshape(*values.shape[:-1], -1, width).mean(axis=-1)


def _refusal(d: Vector) -> str | None:
    if len(d) < MIN_POINTS:
        return f"{len(d)} usable points; {MIN_POINTS} are needed"
    if len(np.unique(d)) < MIN_POINTS:
        return f"{len(np.unique(d))} different values of KL; {MIN_POINTS} are needed"
    if d.max() < MIN_SPAN * d.min():
        low, high = d.min() ** 2, d.max() ** 2
        return f"KL only went from {low:.3g} to {high:.3g} nats; √KL must at least grow {MIN_SPAN:g}-fold"
    return None


def _at(kl: float, interval: Interval) -> str:
    """A place and its interval in d = √KL.

    >>> _at(4.0, (1.0, 9.0))
    'd = 2 [1, 3]'
    """
    return f"d = {math.sqrt(kl):.3g} [{math.sqrt(interval[0]):.3g}, {math.sqrt(interval[1]):.3g}]"
