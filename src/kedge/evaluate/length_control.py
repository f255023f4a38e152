"""Length-controlled win rate (Dubois et al. 2024, "Length-Controlled AlpacaEval", eq. 2), for one pair of models.

    P(model beats baseline) = σ(θ + φ · tanh(Δ / s))        Δ: how many tokens longer, s: the standard deviation of Δ

is fitted by maximum likelihood, and the rate is what is left at Δ = 0: σ(θ). Left out: the difficulty of each prompt,
which the paper learns from many models at once. Shape letters: N comparisons, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kedge.evaluate.intervals import Estimate, ends, resamples

FITS = 300
"""Bootstrap samples: each of them is a regression."""
_PRECISION = 1e-2
"""Of the normal prior of θ and φ (std 10): only what no data could tell is held by it, such as θ where all win."""
_LONGEST_STEP = 2.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One comparison: what it counts, how many tokens longer the model's answer was, and its share of its prompt."""

    prompt: int
    outcome: float
    """1 won, ½ tied, 0 lost."""
    longer: float
    weight: float


def length_controlled(items: Sequence[Compared], *, seed: int, draws: int = FITS) -> Estimate | None:
    """The rate at equal length. None without comparisons, or where every answer is longer by the same: then length and
    model cannot be told apart."""
    if not items:
        return None
    names = {prompt: place for place, prompt in enumerate(dict.fromkeys(item.prompt for item in items))}
    prompt_N = np.array([names[item.prompt] for item in items])
    outcome_N = np.array([item.outcome for item in items], dtype=np.float64)
    longer_N = np.array([item.longer for item in items], dtype=np.float64)
    weight_N = np.array([item.weight for item in items], dtype=np.float64)
    mean = np.average(longer_N, weights=weight_N)
    spread = math.sqrt(np.average((longer_N - mean) ** 2, weights=weight_N))
    if spread == 0 and mean != 0:
        return None
    length_N = np.tanh(longer_N / spread) if spread else longer_N
    drawn: list[float] = []
    for rows in resamples(len(names), seed=seed, draws=draws):
        for row in rows:
            times_P = np.bincount(row, minlength=len(names))
            drawn.append(sigmoid(fit(outcome_N, length_N, weight_N * times_P[prompt_N])[0]))
    low, high = ends(np.array(drawn))
    rate = sigmoid(fit(outcome_N, length_N, weight_N)[0])
    return Estimate(mean=rate, low=low, high=high, prompts=len(names))


def fit(outcome_N: Floats, length_N: Floats, weight_N: Floats, *, rounds: int = 100) -> tuple[float, float]:
    """θ and φ that maximise Σ w · (y log p + (1 − y) log(1 − p)) − ½ · 0.01 · (θ² + φ²), by Newton's method."""
    inputs_N2 = np.stack([np.ones_like(length_N), length_N], axis=1)
    found_2 = np.zeros(2)
    for _ in range(rounds):
        p_N = 1 / (1 + np.exp(-(inputs_N2 @ found_2)))
        slope_2 = inputs_N2.T @ (weight_N * (outcome_N - p_N)) - _PRECISION * found_2
        curve_22 = inputs_N2.T @ (inputs_N2 * (weight_N * p_N * (1 - p_N))[:, None]) + _PRECISION * np.eye(2)
        # Where nearly all win, the curve is flat and a whole step would go too far.
        step_2 = np.clip(np.linalg.solve(curve_22, slope_2), -_LONGEST_STEP, _LONGEST_STEP)
        found_2 = found_2 + step_2
        if np.abs(step_2).max() < 1e-10:
            break
    return float(found_2[0]), float(found_2[1])


def sigmoid(x: float) -> float:
    """
    >>> sigmoid(0.0)
    0.5
    """
    return 1 / (1 + math.exp(-x))
