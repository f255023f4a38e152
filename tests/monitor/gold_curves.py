"""Synthetic curves of gold over d = √KL of which it is known what became of gold, and what must be said of each.

CASES are `LAW SHAPE NOISE SEED`; `attempt` says what is wrong with the words, the peak or the collapse.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from kedge.monitor.gold_law import Kind
from kedge.monitor.overoptimisation import Fit, NoFit, fit

COLLAPSE = 4.0
"""The d of a collapse, where there is one; curves end at d = 6."""
PARAMETERS: Mapping[Kind, tuple[float, float]] = {"rl": (1.5, 0.9), "best_of_n": (1.2, 0.25)}
PEAKS: Mapping[Kind, float] = {"rl": math.exp(1.5 / 0.9 - 1), "best_of_n": 1.2 / 0.5}

SHAPES: Mapping[str, tuple[str, str]] = {
    "bends": ("peak", "gold bends and has fallen, with its peak at d = "),
    "drops": ("collapsed", "gold collapsed at d = "),
    "slides": ("collapsed", "gold collapsed at d = "),
    "rises and crashes": ("collapsed", "gold collapsed at d = "),
    "rises": ("not_bent", "gold does not bend down yet, up to d = 6"),
    "flat": ("flat", "gold neither rises nor falls up to d = 6"),
    "falls": ("falls", ""),
}
"""What must be said of each: the outcome, and how its words begin."""
NOISES = (0.02, 0.1)
CASES = tuple(
    f"{kind}/{shape}/{noise}/{seed}"
    for kind in PARAMETERS
    for shape in SHAPES
    for noise in NOISES
    for seed in (1, 2, 3)
)


def attempt(case: str) -> str | None:
    """None where what is said of the curve is right; else what is not."""
    kind, shape, noise, seed = case.split("/")
    outcome, words = SHAPES[shape]
    curve = fit(*points(_kind(kind), shape, float(noise), int(seed)), kind=_kind(kind))
    if curve.outcome != outcome or not curve.in_words().startswith(words):
        return f"{shape}: {curve.outcome}: {curve.in_words()}"
    return wrong_peak(curve, PEAKS[_kind(kind)]) or wrong_collapse(curve)


def wrong_peak(curve: Fit | NoFit, d: float) -> str | None:
    """What is wrong with a fitted peak that is known to be at d; its interval is one of 95 %, so twice as wide a one is
    asked for."""
    if isinstance(curve, NoFit):
        return None
    low, high = (math.log(kl) / 2 for kl in curve.peak_kl_interval)
    margin = (high - low) / 2
    if not low - margin <= math.log(d) <= high + margin:
        return f"the peak is at d = {d:.3g}: {curve.in_words()}"
    return None


def wrong_collapse(curve: Fit | NoFit) -> str | None:
    if curve.collapse_kl is None:
        return None
    at, law = math.sqrt(curve.collapse_kl), curve.law
    if not COLLAPSE - 0.1 <= at <= COLLAPSE + 0.8:
        return f"gold collapsed at {COLLAPSE}: {curve.in_words()}"
    # The mean of five may bear a collapse of which one point is seen.
    if law is not None and law.d_range[1] > COLLAPSE + 0.4:
        return f"the law is fitted beyond the collapse, up to d = {law.d_range[1]:.3g}"
    return None


def points(kind: Kind, shape: str, noise: float, seed: int, *, size: int = 60) -> tuple[list[float], list[float]]:
    """KL and gold of a curve."""
    rng = random.Random(seed)
    d = [6 * ((step + 1) / size) ** 0.8 for step in range(size)]
    truth = shape_of(kind, shape)
    return [x * x for x in d], [truth(x) + rng.gauss(0, noise) for x in d]


def shape_of(kind: Kind, shape: str) -> Callable[[float], float]:
    alpha, beta = PARAMETERS[kind]

    def law(d: float) -> float:
        return 0.3 + d * (alpha - beta * (math.log(d) if kind == "rl" else d))

    def falls(d: float) -> float:
        return 0.3 - 0.5 * d - (0.05 * d * d if kind == "best_of_n" else 0)

    return {
        "bends": law,
        "drops": lambda d: law(d) if d < COLLAPSE else -3.0,
        "slides": lambda d: law(d) if d < COLLAPSE else law(COLLAPSE) - 3 * (d - COLLAPSE),
        "rises and crashes": lambda d: 0.3 + 0.5 * d if d < COLLAPSE else -2.0,
        "rises": lambda d: 0.3 + 0.5 * d,
        "flat": lambda _: 0.3,
        "falls": falls,
    }[shape]


def _kind(name: str) -> Kind:
    return "rl" if name == "rl" else "best_of_n"
