"""Do the statistics of labels find who guesses, and do soft labels teach a reward more than majorities?

Simulated: pairs with 20 features, the better answer by true weights, sides at random, three labels a pair from ten
people: eight who say the better answer with probability 0.6 to 0.95, a spammer who throws a coin, and one who always
says left. A linear reward is fitted to the majority of each pair, and to Dawid and Skene's posterior as soft labels
(the loss of `reward` with `labels: soft`); both are measured on new pairs.

    python benchmarks/simulated_people.py [SEEDS]

Exit code 1 where the spammer or the one who says left is not found in every seed, or the gain of soft labels is not
above 0 by its 95 % interval over seeds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from kedge.core.stats import Floats, logistic_fit, student_interval
from kedge.feedback import dawid_skene, gold_check, krippendorff_alpha, position_bias

SKILLS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
SPAMMER, LEFT = len(SKILLS), len(SKILLS) + 1
NAMES = (*(f"skill {skill:.2f}" for skill in SKILLS), "spammer", "always left")
PAIRS, LABELS, FEATURES, HELD_OUT, GOLD = 1_500, 3, 20, 5_000, 30


@dataclass(frozen=True)
class Outcome:
    """Of one seed."""

    accuracy_J: Floats
    bias_J: Floats
    is_biased_J: np.ndarray[tuple[int], np.dtype[np.bool_]]
    is_paused_J: np.ndarray[tuple[int], np.dtype[np.bool_]]
    alpha: float
    majority: float
    """Held-out accuracy of the reward that learnt from majorities."""
    soft: float

    @property
    def is_spammer_found(self) -> bool:
        """Both who do not look at the answers are the least accurate, and who says left is biased."""
        return set(np.argsort(self.accuracy_J)[:2].tolist()) == {SPAMMER, LEFT} and bool(self.is_biased_J[LEFT])


def simulate(seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    weights_D = rng.normal(size=FEATURES)
    pair_ND, new_ND = rng.normal(size=(PAIRS, FEATURES)), rng.normal(size=(HELD_OUT, FEATURES))
    truth_N = (pair_ND @ weights_D < 0).astype(int)  # 0: the left answer is the better one
    ratings = [_labels(int(truth), rng) for truth in truth_N]
    fitted = dawid_skene(ratings, classes=2, mirrored=True)
    left_share_N = np.array([[label for label in row if label is not None].count(0) for row in ratings]) / LABELS
    sides = [[row[person] for row in ratings if row[person] is not None] for person in range(len(NAMES))]
    biases = [position_bias(labels.count(0), labels.count(1)) for labels in sides]
    gold = [int(rng.binomial(GOLD, skill)) for skill in (*SKILLS, 0.5, 0.5)]
    return Outcome(
        accuracy_J=fitted.accuracy,
        bias_J=np.array([bias.value for bias in biases]),
        is_biased_J=np.array([bias.low > 0 or bias.high < 0 for bias in biases]),
        is_paused_J=np.array([gold_check(right, GOLD).pause for right in gold]),
        alpha=krippendorff_alpha(ratings),
        majority=_held_out(pair_ND, (left_share_N > 0.5).astype(np.float64), new_ND, weights_D),
        soft=_held_out(pair_ND, fitted.posterior[:, 0], new_ND, weights_D),
    )


def _labels(truth: int, rng: np.random.Generator) -> list[int | None]:
    row: list[int | None] = [None] * len(NAMES)
    for person in rng.choice(len(NAMES), LABELS, replace=False):
        if person == LEFT:
            row[person] = 0
        else:
            skill = 0.5 if person == SPAMMER else SKILLS[person]
            row[person] = truth if rng.random() < skill else 1 - truth
    return row


def _held_out(pair_ND: Floats, left_N: Floats, new_ND: Floats, weights_D: Floats) -> float:
    """The share of new pairs in the true order, of a reward that learnt P(left is better) = `left_N`."""
    fitted_D = logistic_fit(left_N, pair_ND, np.ones(len(pair_ND)), precision=1.0)
    return float(np.mean((new_ND @ fitted_D > 0) == (new_ND @ weights_D > 0)))


def main(seeds: int = 8) -> int:
    outcomes = [simulate(seed) for seed in range(seeds)]
    print(
        f"{PAIRS:,} pairs, {LABELS} labels each of {len(NAMES)} people, {seeds} seeds; α {_mean(outcomes, 'alpha'):.2f}"
    )
    print(f"{'person':<14}{'accuracy':>10}{'least, most':>16}{'P(left) - ½':>13}{'biased':>8}{'paused by gold':>16}")
    for person, name in enumerate(NAMES):
        own = [float(outcome.accuracy_J[person]) for outcome in outcomes]
        bias = np.mean([outcome.bias_J[person] for outcome in outcomes])
        biased = sum(bool(outcome.is_biased_J[person]) for outcome in outcomes)
        paused = sum(bool(outcome.is_paused_J[person]) for outcome in outcomes)
        span = f"{min(own):.3f}, {max(own):.3f}"
        print(
            f"{name:<14}{np.mean(own):>10.3f}{span:>16}{bias:>13.3f}{f'{biased}/{seeds}':>8}{f'{paused}/{seeds}':>16}"
        )
    found = sum(outcome.is_spammer_found for outcome in outcomes)
    print(f"\nboth who do not look are the least accurate, and who says left is biased: {found} of {seeds} seeds")
    gain, low, high = student_interval([outcome.soft - outcome.majority for outcome in outcomes])
    print(f"held-out accuracy: majority {_mean(outcomes, 'majority'):.4f}, soft {_mean(outcomes, 'soft'):.4f}")
    print(f"gain of soft labels: {gain:+.4f} [{low:+.4f}, {high:+.4f}]")
    is_held = found == seeds and low > 0
    print("held" if is_held else "NOT HELD")
    return 0 if is_held else 1


def _mean(outcomes: list[Outcome], field: str) -> float:
    return float(np.mean([getattr(outcome, field) for outcome in outcomes]))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
