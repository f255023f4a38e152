"""The false alarms of each detector in simulated healthy PPO runs.

    python benchmarks/detector_false_alarms.py [--runs 300] [--steps 200]

A healthy run is drawn anew each time: reward and gold rise and level off, KL goes to its target, answers grow by up to
70 %, entropy falls by up to 65 %, with the sampling noise of 16, 64 or 256 answers a step. What is simulated is in
`healthy`. Exit code 1 when there is more than one warning in ten runs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator

from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog

TARGET, LIMIT = 6.0, 12.0


def healthy(rng: random.Random, *, steps: int, answers: int) -> Iterator[dict[str, float]]:
    """The metrics of a run in which nothing is wrong; numbers drawn per run, noise as of `answers` a step."""
    noise = 1 / math.sqrt(answers)
    pace, gain = rng.uniform(10, 60), rng.uniform(0.3, 3.0)
    start, std_end, gold_share = rng.gauss(0, 1), rng.uniform(0.5, 1.3), rng.uniform(0.3, 1.0)
    kl_end, kl_swing = TARGET * rng.uniform(0.2, 1.2), rng.uniform(0, 0.15)
    length, longer = rng.uniform(30, 200), rng.uniform(0.8, 1.7)
    correlation, entropy, entropy_end = rng.uniform(-0.3, 0.4), rng.uniform(0.5, 2.5), rng.uniform(0.35, 1.1)
    clipped, spread = rng.uniform(0.003, 0.15), rng.uniform(0.2, 0.5)
    explained_start, explained_end = rng.uniform(-0.5, 0.2), rng.uniform(0.15, 0.8)
    truncated, repeated, distinct = rng.uniform(0, 0.3), rng.uniform(0.005, 0.1), rng.uniform(0.3, 0.7)
    alike, mismatch = rng.uniform(0.02, 0.25), rng.choice((2e-6, 0.005, 0.015))
    coef, drift = rng.uniform(0.01, 0.5), 0.0
    untrained = rng.uniform(0.3, 1.1)  # the critic's first loss over that of one that predicts 0, as in real runs
    for step in range(steps):
        done = 1 - math.exp(-step / pace)
        std = 1 + (std_end - 1) * done
        kl = kl_end * done * (1 + kl_swing * math.sin(step / 9))
        drift = 0.8 * drift + rng.gauss(0, 0.02)  # of the policy itself, beside the noise of sampling
        scores = start + gain * done + drift + rng.gauss(0, std * noise)
        spread_now = std * abs(1 + rng.gauss(0, noise / math.sqrt(2)))
        loss = untrained * (scores**2 + spread_now**2) / 2
        yield {
            "reward/mean": scores,
            "reward/std": spread_now,
            "reward/length_correlation": correlation + rng.gauss(0, (1 - correlation**2) * noise),
            "reward/disagreement": (1 + 0.4 * done) * abs(1 + rng.gauss(0, 0.6 * noise)),
            "reward/out_of_range": _share(rng, 0.02 + 0.08 * done, answers),
            "reward/unscored": _share(rng, 0.01, answers),
            "gold/mean": gold_share * gain * done + drift + rng.gauss(0, noise),
            "kl/mean": kl + rng.gauss(0, math.sqrt(2 * kl + 1e-6) * noise),
            "kl/coef": coef,
            "length/mean": length * (1 + (longer - 1) * done) * abs(1 + rng.gauss(0, 0.6 * noise)),
            "length/truncated": _share(rng, truncated, answers),
            "entropy/mean": entropy * (1 + (entropy_end - 1) * done) * abs(1 + rng.gauss(0, 0.2 * noise)),
            "repetition/mean": repeated * (1 + 0.5 * done) * abs(1 + rng.gauss(0, noise)),
            "distinct/mean": distinct * (1 - 0.25 * done) * abs(1 + rng.gauss(0, 0.1 * noise)),
            "similarity/mean": alike * (1 + 0.6 * done) * abs(1 + rng.gauss(0, 0.3 * noise)),
            "policy/loss": rng.gauss(0, 0.02),
            "policy/clip_fraction": clipped * rng.lognormvariate(0, 0.4),
            "policy/approx_kl": 0.1 * clipped * rng.lognormvariate(0, 0.5),
            "policy/grad_norm": rng.lognormvariate(0, spread),
            "policy/mismatch": mismatch * rng.lognormvariate(0, 0.2),
            "value/loss": loss * (0.2 + 0.8 * math.exp(-step / 15)) * rng.lognormvariate(0, noise),
            "value/grad_norm": rng.lognormvariate(0, 1.2 * spread),
            "value/explained_variance": min(
                1.0, explained_end + (explained_start - explained_end) * math.exp(-step / 6) + rng.gauss(0, noise / 2)
            ),
        }


def _share(rng: random.Random, share: float, answers: int) -> float:
    return sum(rng.random() < share for _ in range(answers)) / answers


def alarms_of(seed: int, *, steps: int, answers: int) -> list[str]:
    """The codes of all alarms in one healthy run."""
    rng = random.Random(f"{answers}/{seed}")
    watchdog = Watchdog(CATALOGUE, DetectorSettings(), kl_target=TARGET, kl_limit=LIMIT)
    stream = enumerate(healthy(rng, steps=steps, answers=answers), start=1)
    return [alarm.code for step, metrics in stream for alarm in watchdog.observe(step, metrics)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="runs for each number of answers a step")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    sizes = (16, 64, 256)
    counts: dict[int, Counter[str]] = {}
    for answers in sizes:
        runs = [alarms_of(seed, steps=args.steps, answers=answers) for seed in range(args.runs)]
        counts[answers] = Counter(code for codes in runs for code in codes)
    print(f"false alarms in {args.runs} healthy runs of {args.steps} steps, by answers a step\n")
    print(f"{'':28}" + "".join(f"{answers:>8}" for answers in sizes))
    for detector in CATALOGUE:
        print(f"{detector.code:28}" + "".join(f"{counts[answers][detector.code]:8}" for answers in sizes))
    warnings = {detector.code for detector in CATALOGUE if detector.level != "info"}
    totals = {answers: sum(counts[answers][code] for code in warnings) / args.runs for answers in sizes}
    print(f"{'warnings in ten runs':28}" + "".join(f"{10 * totals[answers]:8.2f}" for answers in sizes))
    return int(max(totals.values()) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
