"""The page and the figure of the study of overoptimisation, from the files of its seeds alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from common import (
    RESULTS,
    Estimate,
    Options,
    Record,
    cell,
    estimates,
    mean_over_seeds,
    numbers,
    over_seeds,
    points,
    provenance,
    read_seeds,
    table,
    write_page,
)
from kedge.core.stats import best_of_kl
from kedge.report.words import number
from overoptimisation_curves import AT_KL, AT_N
from overoptimisation_figure import names_in, plots, title_of

WORDS = {
    "peak": "peak",
    "collapsed": "collapsed",
    "fallen": "fell, not by the law",
    "falls": "fell from the start",
    "not_bent": "not bent yet",
    "flat": "flat",
    "too_few_points": "too few points",
    "no_law": "no law",
}
NOTHING = "No seed has been run yet."
PAGE = RESULTS / "overoptimisation.md"
"""The words, with the places of the tables."""


def merge(options: Options) -> None:
    """Page and figure from the seeds that are there; nothing where there are none."""
    seeds = read_seeds(options.seeds)
    if seeds:
        write_page(options, PAGE.read_text(encoding="utf-8"), blocks(seeds), plots(seeds))


def blocks(seeds: Sequence[Record]) -> dict[str, str]:
    return {
        "verdict": verdict(seeds),
        "figure": "![Gold and proxies over the square root of KL, best-of-N and PPO](overoptimisation.svg)",
        "setup": setup_table(seeds),
        "gold": gold_table(seeds),
        "proxies": proxy_table(seeds),
        "best_of_n": best_of_n_table(seeds),
        "best_of_n_laws": law_table(seeds, "best_of_n"),
        "ppo": ppo_table(seeds),
        "ppo_laws": law_table(seeds, "ppo"),
        "ensembles": ensemble_table(seeds),
        "costs": cost_table(seeds),
        "provenance": provenance(seeds),
    }


def verdict(seeds: Sequence[Record]) -> str:
    """What came out, in sentences."""
    lines = [f"- {line}" for part in ("best_of_n", "ppo") for line in outcomes(seeds, part)]
    for name in names_in(seeds, "best_of_n", "versus"):
        estimate = _over(estimates(seeds, "best_of_n", "versus", name, str(AT_N[-1])))
        if estimate is not None and name.endswith("over single"):
            sure = (
                "gains" if estimate.low > 0 else "loses" if estimate.high < 0 else "makes no difference that is shown"
            )
            lines.append(f"- Best of {AT_N[-1]:,} by an ensemble ({title_of(name)}) {sure}: {cell(estimate, 2)}.")
    return "\n".join(lines) if lines else NOTHING


def outcomes(seeds: Sequence[Record], part: str) -> list[str]:
    """For each proxy, what became of gold in how many of the seeds, and where its peak was."""
    lines: list[str] = []
    for name in names_in(seeds, part, "curves"):
        fits = [curve["fit"] for seed in seeds if (curve := seed["parts"].get(part, {}).get("curves", {}).get(name))]
        counts = Counter(law_cells(fit)[0] for fit in fits)
        words = ", ".join(f"{word} ({count} of {len(fits)})" for word, count in counts.most_common())
        peaks = [peak for fit in fits if (peak := peak_of(fit)) is not None]
        where = f"; peak of the law at d = {_peaks(peaks)}" if peaks else ""
        lines.append(f"{'Best-of-N' if part == 'best_of_n' else 'PPO'}, {title_of(name)}: gold {words}{where}.")
    return lines


def _peaks(peaks: Sequence[Estimate]) -> str:
    peak = over_seeds(peaks)
    return _with_ends([peak.value, peak.low, peak.high if math.isfinite(peak.high) else None])


def peak_of(fit: Record) -> Estimate | None:
    """Of the law, in d, with its interval, whose upper end may be ∞."""
    middle, low, high = fit.get("peak_d", (None, None, None))
    if middle is None:
        return None
    return Estimate(value=middle, low=low or 0.0, high=math.inf if high is None else high, count=1)


def setup_table(seeds: Sequence[Record]) -> str:
    """Of the first seed: all have the same."""
    parts = next((seed["parts"]["gold"] for seed in seeds if "gold" in seed["parts"]), None)
    return table(["what", "how much"], parts["setup"].items()) if parts else NOTHING


def gold_table(seeds: Sequence[Record]) -> str:
    """Of one seed that has it: all have the same gold."""
    parts = next((seed["parts"]["gold"] for seed in seeds if "gold" in seed["parts"]), None)
    if parts is None:
        return NOTHING
    gold = parts["gold"]
    rows = [("all", _share(gold["accuracy"]), str(gold["accuracy"]["n"]))]
    rows += [
        (name, _share(share), str(share["n"])) for name, share in sorted(gold["by_group"].get("source", {}).items())
    ]
    if gold["balanced"] is not None:
        rows.append(("all, balanced by length", points(_estimate(gold["balanced"])), ""))
    rows.append(("all, by the rule that the longer wins", points(_estimate(gold["longer_wins"])), ""))
    return table(["held-out pairs of", "gold is right, %", "pairs"], rows)


def proxy_table(seeds: Sequence[Record]) -> str:
    names = names_in(seeds, "proxies", "proxies")
    rows = [
        (
            title_of(name),
            points(
                _over(
                    [
                        _estimate(seed["parts"]["proxies"]["proxies"][name]["accuracy"])
                        for seed in seeds
                        if name in seed["parts"].get("proxies", {}).get("proxies", {})
                    ]
                )
            ),
        )
        for name in names
    ]
    return table(["proxy", "agrees with gold, %"], rows) if rows else NOTHING


def best_of_n_table(seeds: Sequence[Record]) -> str:
    rows = [
        (title_of(name), *(cell(_over(estimates(seeds, "best_of_n", "curves", name, "at_n", str(n))), 2) for n in AT_N))
        for name in names_in(seeds, "best_of_n", "curves")
    ]
    gold = [cell(_over(estimates(seeds, "best_of_n", "gold itself", "at_n", str(n))), 2) for n in AT_N]
    head = ["chosen by", *(f"n = {n:,} ({best_of_kl(n):.2f} nats)" for n in AT_N)]
    if not rows:
        return NOTHING
    tied = [share for seed in seeds for share in seed["parts"].get("best_of_n", {}).get("tied", {}).values()]
    ties = (
        f"Of the answers to a prompt, up to {max(tied):.1%} have the score of another one, mostly because they are the "
        "same text; where answers tie, ln n − (n − 1)/n is an upper bound of the KL."
    )
    return f"{table(head, [*rows, ('gold itself', *gold)])}\n\n{ties}"


def ppo_table(seeds: Sequence[Record]) -> str:
    rows = []
    for name in names_in(seeds, "ppo", "curves"):
        curves = [curve for seed in seeds if (curve := seed["parts"].get("ppo", {}).get("curves", {}).get(name))]
        at_kl = (cell(_over(estimates(seeds, "ppo", "curves", name, "at_kl", f"{at:g}")), 2) for at in AT_KL)
        best = mean_over_seeds([max(_means(curve["gold"])) for curve in curves])
        end = mean_over_seeds([_means(curve["gold"])[-1] for curve in curves])
        last = mean_over_seeds([float(np.mean(curve["kl"][-5:])) for curve in curves])
        rows.append((title_of(name), *at_kl, cell(best, 2), cell(end, 2), cell(last, 1)))
    head = ["reward", *(f"{at:g} nats" for at in AT_KL), "best", "at the end", "KL at the end"]
    return table(head, rows) + _broken_off(seeds) if rows else NOTHING


def _broken_off(seeds: Sequence[Record]) -> str:
    """Runs that did not come to their end, in a sentence; nothing where there are none."""
    found = [
        f"{title_of(name)} (seed {seed['seed']}, {len(curve['kl'])} iterations)"
        for seed in seeds
        for name, curve in seed["parts"].get("ppo", {}).get("curves", {}).items()
        if not curve.get("is_whole", True)
    ]
    return f"\n\nBroken off before their end: {', '.join(found)}." if found else ""


def law_table(seeds: Sequence[Record], part: str) -> str:
    """A line a curve and seed: what became of gold, the peak, R², the range."""
    rows = []
    for name in names_in(seeds, part, "curves"):
        for seed in seeds:
            curve = seed["parts"].get(part, {}).get("curves", {}).get(name)
            if curve is not None:
                rows.append((title_of(name), str(seed["seed"]), *law_cells(curve["fit"])))
    head = ["", "seed", "gold", "peak at d", "collapse at d", "α", "β", "R²", "fitted from d to d"]
    return table(head, rows) if rows else NOTHING


def law_cells(fit: Record) -> tuple[str, ...]:
    """
    >>> law = {"alpha": 1.0, "beta": 0.1, "r2": 0.99, "d_range": [0, 2.4], "measured_peak_d": None, "collapse_d": None}
    >>> law_cells({"outcome": "not_bent", "has_fallen": False, **law})
    ('not bent yet', '–', '–', '1.000', '0.100', '0.990', '0.00 to 2.40')
    """
    outcome = WORDS[fit["outcome"]]
    if fit["outcome"] == "peak" and not fit["has_fallen"]:
        is_within = fit["peak_d"][0] is not None and fit["peak_d"][0] <= fit["d_range"][1]
        outcome = "bends" if is_within else "bends, peak predicted"
    peak = "–"
    if "peak_d" in fit:
        peak = _with_ends(fit["peak_d"])
    elif fit["has_fallen"] and fit["measured_peak_d"] is not None:
        peak = f"{_with_ends(fit['measured_peak_d'])}, as measured"
    law = [number(fit.get(key), 3) for key in ("alpha", "beta", "r2")]
    low, high = fit.get("d_range", (None, None))
    span = "–" if low is None else f"{number(low, 2)} to {number(high, 2)}"
    return outcome, peak, number(fit["collapse_d"], 2), *law, span


def ensemble_table(seeds: Sequence[Record]) -> str:
    """Best-of-N by prompt within a seed; PPO by the means at equal KL of two runs."""
    rows = [
        (
            f"best-of-N: {title_of(name)}",
            *(cell(_over(estimates(seeds, "best_of_n", "versus", name, str(n))), 2) for n in AT_N),
        )
        for name in names_in(seeds, "best_of_n", "versus")
    ]
    head = ["", *(f"n = {n:,}" for n in AT_N)]
    best_of_n = table(head, rows) if rows else NOTHING
    runs = names_in(seeds, "ppo", "curves")
    pairs = [
        (name, single) for name in runs if (single := f"single-{name.rpartition('-')[2]}") in runs and name != single
    ]
    ppo_rows = [
        (
            f"PPO: {title_of(name)} over {title_of(single)}",
            *(cell(ppo_difference(seeds, name, single, at), 2) for at in AT_KL),
        )
        for name, single in pairs
    ]
    ppo = table(["", *(f"{at:g} nats" for at in AT_KL)], ppo_rows) if ppo_rows else NOTHING
    return f"{best_of_n}\n\n{ppo}"


def ppo_difference(seeds: Sequence[Record], name: str, other: str, at: float) -> Estimate | None:
    """Over the seeds in which both runs went so far."""
    differences = []
    for seed in seeds:
        ends = [estimates([seed], "ppo", "curves", run, "at_kl", f"{at:g}") for run in (name, other)]
        if all(ends):
            (ours,), (theirs,) = ends
            value = ours.value - theirs.value
            reach = math.hypot(ours.value - ours.low, theirs.value - theirs.low)
            differences.append(Estimate(value=value, low=value - reach, high=value + reach, count=ours.count))
    return _over(differences)


def cost_table(seeds: Sequence[Record]) -> str:
    """Seconds of each part, and the largest memory of a stage in it."""
    rows = []
    for part in ("gold", "labels", "proxies", "best_of_n", "ppo"):
        costs = [cost for seed in seeds for cost in seed["parts"].get(part, {}).get("cost", {}).values()]
        peaks = [cost["peak_gib"] for cost in costs if cost["peak_gib"] is not None]
        seconds = numbers(seeds, part, "seconds")
        if seconds:
            # Gold is made once: the seed that made it says how long that took.
            took = cell(mean_over_seeds([max(seconds)] if part == "gold" else seconds), 0)
            name = "gold, once for all seeds" if part == "gold" else part
            rows.append((name, took, number(max(peaks), 1) if peaks else "–"))
    return table(["part", "seconds a seed", "peak GiB of one run"], rows) if rows else NOTHING


def _means(gold: Sequence[float]) -> list[float]:
    """Of five neighbours in the run."""
    width = min(5, len(gold))
    return np.convolve(gold, np.full(width, 1 / width), mode="valid").tolist()


def _share(share: Mapping[str, float]) -> str:
    return points(_estimate(share))


def _estimate(share: Mapping[str, float]) -> Estimate:
    return Estimate(value=share["value"], low=share["low"], high=share["high"], count=int(share.get("n", 0)))


def _over(found: Sequence[Estimate]) -> Estimate | None:
    return over_seeds(found) if found else None


def _with_ends(ends: Sequence[float | None]) -> str:
    """
    >>> _with_ends([2.0, 1.5, None])
    '2.00 [1.50, ∞]'
    """
    middle, low, high = ("∞" if end is None else number(end, 2) for end in ends)
    return f"{middle} [{low}, {high}]"
