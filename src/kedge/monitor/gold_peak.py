"""Where gold was best in a run, and whether it has fallen since: by what was measured and no law."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kedge.monitor.detectors.watchdog import noise_of
from kedge.monitor.gold_law import Interval, Vector

LOOKS = 5
"""Gold is compared by means of so many neighbouring measurements: of single ones, the luckiest would be the best."""
PEAK_Z, FALL_Z = 1.25, 5.0
"""Standard errors below the best mean within which a mean may be the peak as well, and beyond which gold has fallen:
the best of many means is a lucky one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPeak:
    """Where gold was best, by what was measured and no law."""

    kl: float
    kl_interval: Interval
    """From the lowest to the highest KL of points in a mean of `LOOKS` neighbours that is no more than `PEAK_Z`
    standard errors below the best: at a cliff the best mean ends where the peak is."""
    gold: float
    gold_now: float
    """Mean of the last `LOOKS` points of the run."""
    kl_now: float
    """Of the last point."""
    fall: float
    """Standard errors by which `gold_now` is below the best."""
    is_at_start: bool
    """Whether the lowest KL is among those of the interval."""

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
        kl_interval=(float(kl[windows[is_peak]].min()), float(kl[windows[is_peak]].max())),
        gold=float(means[best]),
        gold_now=now,
        kl_now=float(kl[-1]),
        fall=_ratio(float(means[best]) - now, error),
        is_at_start=bool(is_peak[0]),
    )


def _ratio(difference: float, error: float) -> float:
    """Without any noise, any difference is beyond all errors."""
    return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
