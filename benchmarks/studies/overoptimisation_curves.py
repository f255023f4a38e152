"""Gold over √KL, as numbers: best-of-N from the scores of many answers, PPO from the metrics of a run, their fits.

Gold and proxies are in standard deviations of their scores among answers of the start to the same prompt, from the mean
of these answers: 0 is one answer of the start. Shape letters: P prompts, N answers to each, S sizes n, B draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common import Estimate, Record
from kedge.algorithms.best_of_n import best_of_weights
from kedge.core.stats import Z95, best_of_kl, bootstrap_rows, percentile_interval, student_quantile
from kedge.models.reward.ensemble import combined
from kedge.models.settings import MeanOfMembers, UncertaintyWeighted, WorstMember
from kedge.monitor.detectors.watchdog import noise_of
from kedge.monitor.gold_law import Kind
from kedge.monitor.overoptimisation import Fit, NoFit, fit

Floats = NDArray[np.float64]
COMBINES = {"mean": MeanOfMembers(), "worst": WorstMember(), "uncertainty": UncertaintyWeighted(coef=0.5)}
DRAWS = 1000
LOOKS = 5
"""Measurements of a run around a KL, of which the mean is taken."""
AT_N = (16, 128, 1024)
AT_KL = (2.0, 5.0, 10.0, 20.0, 40.0)
"""Where methods are compared at equal KL: sizes of best-of-N, and nats of PPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Of a source of scores among answers of the start: the mean, and the deviation within a prompt."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, scores_PN: Floats) -> Scale:
        """
        >>> Scale.of(np.array([[0.0, 2.0], [10.0, 12.0]]))
        Scale(mean=6.0, deviation=1.0)
        """
        deviation = math.sqrt(float(np.nanmean(np.nanvar(scores_PN, axis=1))))
        return cls(mean=float(np.nanmean(np.nanmean(scores_PN, axis=1))), deviation=deviation or 1.0)

    def gains(self, scores: Sequence[float]) -> list[float]:
        """Over the first of them, in deviations.

        >>> Scale(mean=6.0, deviation=2.0).gains([7.0, 8.0])
        [0.0, 0.5]
        """
        return [(score - scores[0]) / self.deviation for score in scores]


def sizes_up_to(most: int) -> list[int]:
    """The n at which best-of-N is estimated: powers of two, and one between two of them.

    >>> sizes_up_to(16)
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    powers = [2**k for k in range(most.bit_length()) if 2**k <= most]
    between = [3 * power // 2 for power in powers[1:] if 3 * power // 2 <= most]
    return sorted({*powers, *between, most})


def gains(chooser_PN: Floats, judged_PN: Floats, sizes: Sequence[int]) -> Floats:
    """`gain_PS`: for each prompt, what the best of n by the chooser gains over one answer, in deviations of the judge.

    Every n is an unbiased estimate from all N answers (Nakano et al. 2021). An answer without a score is never chosen.
    """
    scale = Scale.of(judged_PN)
    is_scored_PN = np.isfinite(chooser_PN) & np.isfinite(judged_PN)
    chooser = torch.from_numpy(np.where(is_scored_PN, chooser_PN, np.nan))
    judged = torch.from_numpy(np.where(is_scored_PN, judged_PN, 0.0))
    best_SP = [(best_of_weights(chooser, n=n) * judged).sum(dim=1).numpy() for n in sizes]
    one_P = (judged.sum(dim=1) / torch.from_numpy(is_scored_PN).sum(dim=1)).numpy()
    return (np.stack(best_SP, axis=1) - one_P[:, None]) / scale.deviation


def all_scored(members: Mapping[str, Floats]) -> dict[str, Floats]:
    """`scores_MPN` of each judge, of answers that all of them have scored: the first ones of each prompt, as many as
    the prompt with the fewest has.

    >>> all_scored({"gold": np.array([[[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]]])})["gold"].tolist()
    [[[1.0, 3.0], [4.0, 5.0]]]
    """
    is_scored_PN = np.logical_and.reduce([np.isfinite(scores_MPN).all(axis=0) for scores_MPN in members.values()])
    count = int(is_scored_PN.sum(axis=1).min())
    kept = [np.flatnonzero(is_scored_N)[:count] for is_scored_N in is_scored_PN]
    return {
        name: np.stack([scores_MPN[:, prompt, rows] for prompt, rows in enumerate(kept)], axis=1)
        for name, scores_MPN in members.items()
    }


def best_of_n_curve(gold_PS: Floats, proxy_PS: Floats, sizes: Sequence[int], *, seed: int = 0) -> Record:
    """Gold with its interval and the proxy at each n, and the law; intervals are by resampled prompts."""
    kl = [best_of_kl(n) for n in sizes]
    draws = [gold_PS[rows].mean(axis=1) for rows in bootstrap_rows(len(gold_PS), seed=seed, draws=DRAWS)]
    gold_BS = np.concatenate(draws)
    gold_S = gold_PS.mean(axis=0)
    ends = [percentile_interval(gold_BS[:, at]) for at in range(len(sizes))]
    return {
        "n": list(sizes),
        "kl": rounded(kl),
        "gold": rounded(gold_S.tolist()),
        "gold_low": rounded([low for low, _ in ends]),
        "gold_high": rounded([high for _, high in ends]),
        "proxy": rounded(proxy_PS.mean(axis=0).tolist()),
        "fit": fit_record(fit(kl, gold_S.tolist(), kind="best_of_n", resampled=gold_BS.tolist())),
    }


def at_sizes(gold_PS: Floats, sizes: Sequence[int]) -> Record:
    """The mean over prompts at the n of the comparisons that are there, with Student's t-interval over prompts: of so
    few, resampled ones spread too little."""
    table: Record = {}
    for n in AT_N:
        if n in sizes:
            column_P = gold_PS[:, sizes.index(n)]
            value, count = float(column_P.mean()), len(column_P)
            reach = student_quantile(0.975, count - 1) * float(column_P.std(ddof=1)) / math.sqrt(count)
            table[str(n)] = Estimate(value=value, low=value - reach, high=value + reach, count=count).json()
    return table


def best_of_n_results(members: Mapping[str, Floats], ensembles: Sequence[int], *, most: int, seed: int) -> Record:
    """Curves, their comparisons at equal n, and the scales of all scores, from `scores_MPN` of each judge."""
    members = all_scored(members)
    gold_PN = members["gold"].mean(axis=0)
    choosers = {name: scores_MPN[0] for name, scores_MPN in members.items() if name.startswith("single")}
    for labels in ensembles:
        for how, combine in COMBINES.items():
            scores_MPN = torch.from_numpy(members[f"ensemble-{labels}"])
            choosers[f"{how}-{labels}"] = combined(scores_MPN, combine).numpy()
    sizes = sizes_up_to(min(most, gold_PN.shape[1]))
    gold_of = {name: gains(chooser_PN, gold_PN, sizes) for name, chooser_PN in choosers.items()}
    curves = {
        name: best_of_n_curve(gold_of[name], gains(chooser_PN, chooser_PN, sizes), sizes, seed=seed)
        | {"at_n": at_sizes(gold_of[name], sizes)}
        for name, chooser_PN in choosers.items()
    }
    versus: Record = {}
    for labels in ensembles:
        own_PS = np.mean([gains(one_PN, gold_PN, sizes) for one_PN in members[f"ensemble-{labels}"]], axis=0)
        against = {"single": gold_of[f"single-{labels}"], "one member": own_PS} if f"single-{labels}" in gold_of else {}
        for how in COMBINES:
            for name, other_PS in against.items():
                difference_PS = gold_of[f"{how}-{labels}"] - other_PS
                versus[f"{how}-{labels} over {name}"] = at_sizes(difference_PS, sizes)
    oracle = at_sizes(gains(gold_PN, gold_PN, sizes), sizes)
    scales = {name: _scale(scores_PN) for name, scores_PN in {"gold": gold_PN, **choosers}.items()}
    # KL = ln n − (n − 1)/n is an upper bound where answers tie.
    tied = {name: round(1 - _distinct(scores_PN), 4) for name, scores_PN in choosers.items()}
    return {"curves": curves, "versus": versus, "gold itself": {"at_n": oracle}, "scales": scales, "tied": tied}


def ppo_curve(metrics: Sequence[Mapping[str, Any]], gold: Scale, proxy: Scale) -> Record:
    """KL, gold, proxy and length of each step at which gold was measured, the law, and gold at the KLs to compare."""
    rows = [row for row in metrics if "gold/mean" in row and math.isfinite(row["kl/mean"])]
    kl = [float(row["kl/mean"]) for row in rows]
    # The first answers are of the start, to the same prompts as all that follow.
    scores = gold.gains([row["gold/mean"] for row in rows])
    return {
        "kl": rounded(kl),
        "gold": rounded(scores),
        "proxy": rounded(proxy.gains([row["reward/mean"] for row in rows])),
        "length": rounded([row["length/mean"] for row in rows], 1),
        "fit": fit_record(fit(kl, scores, kind="rl")),
        "at_kl": {f"{at:g}": estimate.json() for at in AT_KL if (estimate := near(kl, scores, at)) is not None},
    }


def near(kl: Sequence[float], gold: Sequence[float], at: float) -> Estimate | None:
    """Gold at a KL: the mean of the `LOOKS` measurements next to it in √KL; None where the run did not go so far.

    Its interval is that of so many measurements, with the noise of neighbours in KL.
    """
    usable = sorted((nats, score) for nats, score in zip(kl, gold, strict=True) if nats >= 0)
    if len(usable) < LOOKS or not usable[0][0] <= at <= usable[-1][0]:
        return None
    closest = sorted(usable, key=lambda pair: abs(math.sqrt(pair[0]) - math.sqrt(at)))[:LOOKS]
    value = float(np.mean([score for _, score in closest]))
    reach = Z95 * noise_of([score for _, score in usable]) / math.sqrt(LOOKS)
    return Estimate(value=value, low=value - reach, high=value + reach, count=LOOKS)


def fit_record(curve: Fit | NoFit) -> Record:
    """What a fit says, as numbers of d = √KL and words."""
    observed = curve.observed
    record: Record = {
        "outcome": curve.outcome,
        "words": curve.in_words(),
        "collapse_d": _root(curve.collapse_kl),
        "measured_peak_d": None if observed is None else [_root(observed.kl), *map(_root, observed.kl_interval)],
        "has_fallen": observed is not None and observed.has_fallen,
    }
    if (law := curve.law) is not None:
        record |= {
            "kind": law.kind,
            "alpha": _short(law.alpha),
            "beta": _short(law.beta),
            "start": _short(law.start),
            "r2": _short(law.r2),
            "d_range": [_short(end) for end in law.d_range],
            "num_points": law.num_points,
        }
    if isinstance(curve, Fit):
        record["peak_d"] = [_root(curve.peak_kl), *map(_root, curve.peak_kl_interval)]
    return record


def law_at(record: Mapping[str, Any], d: float) -> float:
    """The gold score of a law that was written down."""
    kind: Kind = record["kind"]
    slope = record["alpha"] - record["beta"] * (math.log(d) if kind == "rl" else d) if d > 0 else 0.0
    return record["start"] + d * slope


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in values]


def _root(kl: float | None) -> float | None:
    """√KL; None where there is none, or no bound."""
    return None if kl is None or not math.isfinite(kl) else _short(math.sqrt(kl))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _scale(scores_PN: Floats) -> Record:
    scale = Scale.of(scores_PN)
    return {"mean": scale.mean, "deviation": scale.deviation}


def _distinct(scores_PN: Floats) -> float:
    """Of the answers to a prompt, the share that differ in their score."""
    return float(np.mean([len(np.unique(row_N[np.isfinite(row_N)])) / np.isfinite(row_N).sum() for row_N in scores_PN]))
