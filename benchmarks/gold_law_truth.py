"""How often the intervals of the overoptimisation fit hold a truth that is known, in the geometry of its study.

    python benchmarks/gold_law_truth.py

RL: 50 points whose KL grows to the last one, noise of 0.1 on a gain of about 1.6, white or lasting from point to point.
Best-of-N: 32 prompts, n up to 1,024, each prompt with a law of its own and the error of a finite choice of answers;
intervals come from resampled prompts. Every line is 300 curves. Minutes of one CPU thread.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.core.stats import best_of_kl, bootstrap_rows
from kedge.monitor.gold_law import Kind
from kedge.monitor.overoptimisation import Fit, NoFit, fit

CURVES, POINTS, PROMPTS, ANSWERS = 300, 50, 32, 1056
NOISE = 0.1
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    alpha: float
    beta: float
    kind: Kind = "rl"
    most: float = 40.0
    """The last KL."""
    lasting: float = 0.0
    """Correlation of the noise of neighbouring points."""
    cliff: float = math.inf
    """The d from which on gold collapses."""

    @property
    def peak(self) -> float:
        """Of the law, in d."""
        if self.beta <= 0:
            return math.inf
        return math.exp(self.alpha / self.beta - 1) if self.kind == "rl" else self.alpha / (2 * self.beta)


CASES = (
    Case(name="RL, peak at d = 2.7 of 6.3", alpha=1.2, beta=0.6),
    Case(name="the same, noise lasts 0.3", alpha=1.2, beta=0.6, lasting=0.3),
    Case(name="the same, noise lasts 0.5", alpha=1.2, beta=0.6, lasting=0.5),
    Case(name="the same, noise lasts 0.7", alpha=1.2, beta=0.6, lasting=0.7),
    Case(name="RL, collapse at d = 4 before a peak at 4.1", alpha=1.2, beta=0.5, cliff=4.0),
    Case(name="RL, only up to d = 2 of 2.7", alpha=1.2, beta=0.6, most=4.0),
    Case(name="RL, only up to d = 4.5 of 11", alpha=1.2, beta=0.35, most=20.0),
    Case(name="RL, no bend", alpha=0.5, beta=0.0),
    Case(name="best-of-N, peak at d = 1.7 of 2.4", kind="best_of_n", alpha=1.2, beta=0.35),
    Case(name="best-of-N, peak at the end", kind="best_of_n", alpha=1.2, beta=0.25),
    Case(name="best-of-N, peak at d = 5", kind="best_of_n", alpha=1.0, beta=0.1),
    Case(name="best-of-N, no bend", kind="best_of_n", alpha=0.8, beta=0.0),
)


def rl_curve(case: Case, rng: np.random.Generator) -> Fit | NoFit:
    d = np.sqrt(case.most * np.linspace(0, 1, POINTS) ** 1.3 * np.exp(rng.normal(0, 0.03, POINTS)))
    gold = d * (case.alpha - case.beta * np.log(np.maximum(d, 1e-9))) - 3 * np.maximum(d - case.cliff, 0.0)
    noise = rng.normal(0, NOISE, POINTS)
    for at in range(1, POINTS):
        noise[at] = case.lasting * noise[at - 1] + math.sqrt(1 - case.lasting**2) * noise[at]
    return fit((d * d).tolist(), (gold + noise).tolist(), kind="rl")


def best_of_n_curve(case: Case, rng: np.random.Generator) -> Fit | NoFit:
    kl = [best_of_kl(n) for n in SIZES]
    d = np.sqrt(kl)
    alpha_P1, beta_P1 = (rng.normal(at, spread, (PROMPTS, 1)) for at, spread in ((case.alpha, 0.3), (case.beta, 0.08)))
    # The best of n among so many answers hangs on fewer of them the larger n is.
    variance = 0.36 * np.array(SIZES) / ANSWERS
    steps_PS = rng.normal(size=(PROMPTS, len(SIZES))) * np.sqrt(np.diff(variance, prepend=0.0))
    gold_PS: Vector = alpha_P1 * d - beta_P1 * d * d + steps_PS.cumsum(axis=1)
    draws = [gold_PS[rows].mean(axis=1) for rows in bootstrap_rows(PROMPTS, seed=1, draws=1000)]
    return fit(kl, gold_PS.mean(axis=0).tolist(), kind="best_of_n", resampled=np.concatenate(draws).tolist())


def measure(case: Case) -> Iterator[str]:
    rng = np.random.default_rng(7)
    drawn = [(rl_curve if case.kind == "rl" else best_of_n_curve)(case, rng) for _ in range(CURVES)]
    yield case.name
    yield ", ".join(f"{outcome} {count}" for outcome, count in Counter(curve.outcome for curve in drawn).most_common())
    fits = [curve for curve in drawn if isinstance(curve, Fit)]
    spans = [[math.sqrt(end) for end in curve.peak_kl_interval] for curve in fits]
    yield f"{np.mean([low <= case.peak <= high for low, high in spans]):.0%} of {len(fits)}" if fits else "–"
    observed = [curve.observed for curve in drawn if curve.observed is not None and curve.observed.has_fallen]
    best = min(case.peak, case.cliff)
    ends = [[math.sqrt(end) for end in peak.kl_interval] for peak in observed]
    yield f"{np.mean([low <= best <= high for low, high in ends]):.0%} of {len(ends)}" if ends else "–"
    laws = [law.r2 for curve in drawn if (law := curve.law) is not None]
    yield f"{np.median(laws):.3f}" if laws else "–"


def main() -> int:
    print("| curves | said of 300 | the law's peak is in its interval | the measured one is, where gold fell | R² |")
    print("|---|---|---:|---:|---:|")
    for case in CASES:
        print(f"| {' | '.join(measure(case))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
