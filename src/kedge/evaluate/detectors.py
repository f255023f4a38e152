"""Shares that a detector with known errors has counted, corrected for them.

A detector's sensitivity and specificity were measured on so many cases and are as uncertain as that: the interval draws
them from what those cases leave open, beside the share of the items (Rogan and Gladen 1978 for the correction).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kedge.core.stats import BOOTSTRAP_DRAWS, percentile_interval
from kedge.evaluate.paired import rogan_gladen


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """How often a detector was right, in counts: of the cases that are there, and of those that are not."""

    name: str
    found: int
    positives: int
    passed: int
    negatives: int

    @property
    def sensitivity(self) -> float:
        return self.found / self.positives

    @property
    def specificity(self) -> float:
        return self.passed / self.negatives


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedShare:
    """With a 95 % interval."""

    share: float
    low: float
    high: float


def corrected_share(
    observed: float, n: float, detector: Detector, *, seed: int = 0, draws: int = BOOTSTRAP_DRAWS
) -> CorrectedShare:
    """The true share among `n` items of which the detector found the share `observed`; `n` may be the number of
    independent items that would vary like those there are.

    Sensitivity and specificity are drawn from Beta(right + 1, wrong + 1), the observed share from Beta(found + ½,
    others + ½): items drawn with replacement would say nothing of a share of which none was found, and cover 46 % of
    true shares of 0.005 with 40 items where 95 are due.

    >>> judge = Detector(name="judge", found=90, positives=100, passed=80, negatives=100)
    >>> corrected = corrected_share(0.3, 200, judge)
    >>> round(corrected.share, 4), corrected.low < corrected.share < corrected.high
    (0.1429, True)
    """
    if not 0 <= observed <= 1 or n < 1:
        raise ValueError(f"a share from 0 to 1 of one item or more: found {observed} of {n}")
    share = rogan_gladen(observed, detector.sensitivity, detector.specificity)
    rng = np.random.default_rng(seed)
    sensitivity = rng.beta(detector.found + 1, detector.positives - detector.found + 1, draws)
    specificity = rng.beta(detector.passed + 1, detector.negatives - detector.passed + 1, draws)
    counted = rng.beta(observed * n + 0.5, (1 - observed) * n + 0.5, draws)
    informedness = sensitivity + specificity - 1
    is_usable = informedness > 0  # draws in which the detector is no better than chance say nothing of the share
    drawn = (counted + specificity - 1)[is_usable] / informedness[is_usable]
    low, high = percentile_interval(np.clip(drawn, 0, 1))
    return CorrectedShare(share=share, low=min(low, share), high=max(high, share))
