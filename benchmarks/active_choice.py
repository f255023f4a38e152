"""How many labels each way of choosing pairs needs until a linear reward is as accurate as with 800 random ones.

Simulated: 20 features of unequal scale, preferences by Bradley–Terry from true weights, a pool of 4,000 pairs, batches
of 50, a reward fitted after each batch, and the share of 3,000 new pairs that it puts in the true order. Every way but
`random` draws 20 % of each batch at random, as `kedge.feedback.choice.choose` does by default.

    python benchmarks/active_choice.py [SEEDS]
"""

from __future__ import annotations

import sys

import numpy as np

from kedge.core.stats import Floats, logistic_fit
from kedge.feedback.choice import AtRandom, Criterion, DOptimal, Ensemble, Uncertain, choose, laplace_covariance

FEATURES, POOL, BATCH, ROUNDS, HELD_OUT = 20, 4_000, 50, 16, 3_000
MEMBERS = 5
SHOWN = (100, 200, 400, 800)
WAYS = ("random", "uncertain", "ensemble", "d_optimal")
WANTED = 0.6
"""Of the labels that random choice needs, D-optimal choice may need so many at most."""


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def accuracies(way: str, seed: int) -> list[float]:
    """Held-out accuracy after each batch."""
    rng = np.random.default_rng(seed)
    weights_D = rng.normal(size=FEATURES) * 2.4 / np.sqrt(FEATURES)
    scale_D = np.exp(0.7 * rng.normal(size=FEATURES))
    pool_ND = (rng.normal(size=(POOL, FEATURES)) - rng.normal(size=(POOL, FEATURES))) * scale_D
    outcome_N = (rng.random(POOL) < sigmoid(pool_ND @ weights_D)).astype(np.float64)
    new_ND = (rng.normal(size=(HELD_OUT, FEATURES)) - rng.normal(size=(HELD_OUT, FEATURES))) * scale_D
    asked = rng.choice(POOL, BATCH, replace=False).tolist()
    shares: list[float] = []
    for number in range(ROUNDS):
        fitted_D = logistic_fit(outcome_N[asked], pool_ND[asked], np.ones(len(asked)), precision=1.0)
        shares.append(float(np.mean((new_ND @ fitted_D > 0) == (new_ND @ weights_D > 0))))
        left = np.setdiff1d(np.arange(POOL), asked)
        covariance_DD = laplace_covariance(pool_ND[asked], sigmoid(pool_ND[asked] @ fitted_D), precision=1.0)
        criterion = _criterion(way, pool_ND[left], fitted_D, covariance_DD, rng)
        chosen = choose(criterion, count=BATCH, seed=1_000 * seed + number)
        asked += [int(left[pair.index]) for pair in chosen]
    return shares


def labels_needed(accuracy_R: Floats, target: float) -> int | None:
    """Labels after the first batch that reaches the target; None where none does."""
    reached = np.flatnonzero(accuracy_R >= target)
    return BATCH * (int(reached[0]) + 1) if len(reached) else None


def _criterion(
    way: str, left_ND: Floats, fitted_D: Floats, covariance_DD: Floats, rng: np.random.Generator
) -> Criterion:
    p_N = sigmoid(left_ND @ fitted_D)
    match way:
        case "random":
            return AtRandom(pairs=len(left_ND))
        case "uncertain":
            return Uncertain(p_N=p_N)
        case "ensemble":
            members_MD = rng.multivariate_normal(fitted_D, covariance_DD, size=MEMBERS)
            return Ensemble(p_MN=sigmoid(members_MD @ left_ND.T))
        case _:
            return DOptimal(features_ND=left_ND, covariance_DD=covariance_DD, p_N=p_N)


def main(seeds: int = 8) -> int:
    mean = {way: np.mean([accuracies(way, seed) for seed in range(seeds)], axis=0) for way in WAYS}
    target = float(mean["random"][-1])
    print(f"held-out accuracy, mean of {seeds} seeds; target {target:.4f}: random choice at {BATCH * ROUNDS} labels")
    columns = "".join(f"{labels:>9}" for labels in SHOWN)
    print(f"{'way':<12}{columns}{'labels needed':>16}{'share':>8}")
    needed = {way: labels_needed(accuracy_R, target) for way, accuracy_R in mean.items()}
    for way, accuracy_R in mean.items():
        at = "".join(f"{accuracy_R[labels // BATCH - 1]:>9.4f}" for labels in SHOWN)
        labels = needed[way]
        share = "-" if labels is None else f"{labels / (BATCH * ROUNDS):.2f}"
        print(f"{way:<12}{at}{labels or '-':>16}{share:>8}")
    labels = needed["d_optimal"]
    is_held = labels is not None and labels <= WANTED * BATCH * ROUNDS
    print(f"D-optimal needs at most {WANTED} of random's labels: {'held' if is_held else 'NOT HELD'}")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
