"""Statistics that more than one part needs: intervals of shares and means, correlations, κ, logistic fits. No torch.

Intervals are 95 %. Shape letters: N observations, G groups, K inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""
BOOTSTRAP_DRAWS = 2000
"""The ends of a 95 % interval then move by about 2 % of its width from seed to seed."""
_NUMBERS_AT_ONCE = 2_000_000
_LONGEST_STEP = 2.0


def wilson(successes: float, trials: float, *, z: float = Z95) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927): (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, z * z
    centre = share + z2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    scale = 1 + z2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def student_quantile(share: float, dof: int) -> float:
    """The number below which Student's t with so many degrees of freedom is with probability `share`, 0.5 or more.

    >>> round(student_quantile(0.975, 9), 6), round(student_quantile(0.95, 1), 6)
    (2.262157, 6.313752)
    """
    high = 1.0
    while student_cdf(high, dof) < share:
        high *= 2
    return falling_root(lambda t: share - student_cdf(t, dof), 0.0, high)


def student_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of a few independent numbers, of seeds say, and its interval; one number alone says nothing about it.

    >>> [round(number, 3) for number in student_interval([0.1, 0.2, 0.3])], student_interval([0.5])
    ([0.2, -0.048, 0.448], (0.5, -inf, inf))
    """
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, -math.inf, math.inf
    half = student_quantile(0.975, count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of a run's values, ten at the most: single ones are noisy, and more are
    no longer the end.

    >>> ends_of([1.0, 2.0, 3.0]), ends_of(range(20))
    ((1.0, 3.0), (0.5, 18.5))
    """
    size = min(10, max(1, round(len(values) / 10)))
    return fmean(values[:size]), fmean(values[-size:])


def falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses 0 between two numbers, by halving.

    >>> round(falling_root(lambda x: 2 - x * x, 0.0, 2.0), 9)
    1.414213562
    """
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return middle


def places_of(names: Sequence[Hashable]) -> Ints:
    """The number of each name among the different ones, in the order in which they come.

    >>> places_of(["b", "a", "b"]).tolist()
    [0, 1, 0]
    """
    place: dict[Hashable, int] = {}
    return np.array([place.setdefault(name, len(place)) for name in names], dtype=np.int64)


def clustered_variance(value_N: Floats, clusters: Sequence[Hashable] | None) -> tuple[float, int]:
    """The variance of the mean where clusters are independent (Miller 2024), and how many clusters there are."""
    group_N = places_of(range(len(value_N)) if clusters is None else clusters)
    total_G = np.bincount(group_N, weights=value_N - value_N.mean())
    groups = len(total_G)
    if groups < 2:
        return math.inf, groups
    return float((total_G**2).sum() * groups / (groups - 1) / len(value_N) ** 2), groups


def student_cdf(t: float, dof: int) -> float:
    """The share of Student's t below `t`, by the closed sums for even and odd degrees of freedom (Abramowitz and Stegun
    26.7.3 and 26.7.4).

    >>> round(student_cdf(2.262157, 9), 6), student_cdf(0.0, 4), round(student_cdf(-6.313752, 1), 6)
    (0.975, 0.5, 0.05)
    """
    if t < 0:
        return 1 - student_cdf(-t, dof)
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine_2 = math.sin(angle), math.cos(angle) ** 2
    if dof % 2 == 0:
        term = total = 1.0
        for k in range(1, dof // 2):
            term *= cosine_2 * (2 * k - 1) / (2 * k)
            total += term
        return 0.5 + sine * total / 2
    term = total = math.cos(angle) if dof > 1 else 0.0
    for k in range(1, (dof - 1) // 2):
        term *= cosine_2 * (2 * k) / (2 * k + 1)
        total += term
    return 0.5 + (angle + sine * total) / math.pi


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """(p_o − p_e) / (1 − p_e) of two raters; 1 where both give the same label to everything.

    >>> cohen_kappa([1, 1, 2, 2], [1, 2, 2, 2])
    0.5
    """
    observed = sum(label == other for label, other in zip(first, second, strict=True)) / len(first)
    counts, others = Counter(first), Counter(second)
    expected = sum(count * others[label] for label, count in counts.items()) / len(first) ** 2
    return 1.0 if expected == 1 else (observed - expected) / (1 - expected)


def best_of_kl(n: int) -> float:
    """KL(best of n ‖ one answer) = ln n − (n − 1)/n in nats a sequence, whatever the model and the scores.

    Exact where no two answers have one score; where some have, an upper bound (Beirami et al. 2024, theorem 1).

    >>> [round(best_of_kl(n), 4) for n in (1, 2, 8)]
    [0.0, 0.1931, 1.2044]
    """
    return math.log(n) - (n - 1) / n


def bootstrap_mean(
    total_G: Floats, *, seed: int, size_G: Floats | None = None, draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float]:
    """Percentile interval (Efron 1979) of a mean when whole groups are drawn again, with replacement.

    `total_G` is the sum of each group's values and `size_G` their number; without sizes, a group is one value.

    >>> bootstrap_mean(np.array([4.0, 4.0, 4.0]), seed=0)
    (4.0, 4.0)
    """
    means = [
        total_G[rows].mean(axis=1) if size_G is None else total_G[rows].sum(axis=1) / size_G[rows].sum(axis=1)
        for rows in bootstrap_rows(len(total_G), seed=seed, draws=draws)
    ]
    return percentile_interval(np.concatenate(means))


def bootstrap_rows(count: int, *, seed: int, draws: int) -> Iterator[Ints]:
    """`draws` bootstrap samples of `count` rows, as row numbers (some draws at a time, count).

    The same seed draws the same rows, however many are drawn at a time.
    """
    rng = np.random.default_rng(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // count)
    for start in range(0, draws, at_once):
        yield rng.integers(0, count, size=(min(at_once, draws - start), count))


def percentile_interval(drawn: Floats) -> tuple[float, float]:
    """The middle 95 % of bootstrap draws."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def pearson(x_N: Floats, y_N: Floats) -> float | None:
    """Pearson's correlation; None where one of the two does not vary.

    >>> pearson(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])), pearson(np.array([1.0, 2.0]), np.ones(2))
    (1.0, None)
    """
    if not np.ptp(x_N) or not np.ptp(y_N):
        return None
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    # squares of very large or small numbers leave the range of floats
    x_N, y_N = x_N / np.abs(x_N).max(), y_N / np.abs(y_N).max()
    return float(np.clip((x_N * y_N).sum() / np.sqrt((x_N * x_N).sum() * (y_N * y_N).sum()), -1.0, 1.0))


def spearman(x_N: Floats, y_N: Floats) -> float | None:
    """Pearson's correlation of the ranks; equal numbers share the mean of their ranks."""
    return pearson(ranks(x_N), ranks(y_N))


def ranks(x_N: Floats) -> Floats:
    """
    >>> ranks(np.array([7.0, 3.0, 7.0, 9.0])).tolist()
    [2.5, 1.0, 2.5, 4.0]
    """
    _, place_N, count = np.unique(x_N, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place_N]


def sigmoid(x: Floats) -> Floats:
    """σ(x), also where e^−x is more than a float can hold.

    >>> sigmoid(np.array([-1000.0, 0.0, 1000.0])).round(6).tolist()
    [0.0, 0.5, 1.0]
    """
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def logistic_fit(
    outcome_N: Floats, inputs_NK: Floats, weight_N: Floats, *, precision: float, rounds: int = 100
) -> Floats:
    """Weights θ of P(outcome) = σ(inputs · θ), by Newton's method; outcomes may be anything from 0 to 1.

    Maximises Σ w · (y log p + (1 − y) log(1 − p)) − ½ · precision · |θ|²: a normal prior of that precision.

    >>> fitted = logistic_fit(np.array([1.0, 1.0, 1.0, 0.0]), np.ones((4, 1)), np.ones(4), precision=1e-9)
    >>> [round(float(theta), 6) for theta in fitted], round(math.log(3), 6)
    ([1.098612], 1.098612)
    """
    num_inputs = inputs_NK.shape[1]
    theta_K = np.zeros(num_inputs)
    for _ in range(rounds):
        p_N = sigmoid(inputs_NK @ theta_K)
        gradient_K = inputs_NK.T @ (weight_N * (outcome_N - p_N)) - precision * theta_K
        curvature_KK = inputs_NK.T @ (inputs_NK * (weight_N * p_N * (1 - p_N))[:, None])
        # Where nearly all outcomes are 1, the likelihood is flat and a whole step would go too far.
        step_K = np.clip(
            np.linalg.solve(curvature_KK + precision * np.eye(num_inputs), gradient_K), -_LONGEST_STEP, _LONGEST_STEP
        )
        theta_K = theta_K + step_K
        if np.abs(step_K).max() < 1e-10:
            break
    return theta_K


def logistic_slope(inputs: Sequence[float], *, rounds: int = 50) -> float:
    """The slope of P = σ(slope · input) where every outcome is 1, by Newton's method; no intercept and no prior.

    Sums are plain Python's, in the order of the data: margins of reward training depend on their last bit.

    >>> round(logistic_slope([2.0, 2.0, 2.0, -2.0]), 6), round(math.log(3) / 2, 6)
    (0.549306, 0.549306)
    """
    slope = 0.0
    for _ in range(rounds):
        wrong = [1 / (1 + math.exp(slope * x)) for x in inputs]
        gradient = sum(p * x for p, x in zip(wrong, inputs, strict=True))
        curvature = sum(p * (1 - p) * x * x for p, x in zip(wrong, inputs, strict=True))
        slope += gradient / (curvature + 1e-9)
    return slope
