"""The page and the figure of the study of overoptimisation, from the files of its seeds alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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
from kedge.report.charts.plot import COLOURS, Plot, Series
from kedge.report.words import number
from overoptimisation_curves import AT_KL, AT_N, law_at

GRID = 40
"""Places along √KL at which the runs of several seeds are averaged."""
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
            lines.append(f"- Best of {AT_N[-1]:,} by an ensemble ({_name(name)}) {sure}: {cell(estimate, 2)}.")
    return "\n".join(lines) if lines else NOTHING


def outcomes(seeds: Sequence[Record], part: str) -> list[str]:
    """For each proxy, what became of gold in how many of the seeds, and where its peak was."""
    lines: list[str] = []
    for name in names_in(seeds, part, "curves"):
        fits = [curve["fit"] for seed in seeds if (curve := seed["parts"].get(part, {}).get("curves", {}).get(name))]
        counts = Counter(law_cells(fit)[0] for fit in fits)
        words = ", ".join(f"{word} ({count} of {len(fits)})" for word, count in counts.most_common())
        peaks = [fit["peak_d"][0] for fit in fits if fit.get("peak_d") and fit["peak_d"][0] is not None]
        where = f"; peak of the law at d = {cell(mean_over_seeds(peaks), 2)}" if peaks else ""
        lines.append(f"{'Best-of-N' if part == 'best_of_n' else 'PPO'}, {_name(name)}: gold {words}{where}.")
    return lines


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
            _name(name),
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
        (_name(name), *(cell(_over(estimates(seeds, "best_of_n", "curves", name, "at_n", str(n))), 2) for n in AT_N))
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
        rows.append((_name(name), *at_kl, cell(best, 2), cell(end, 2), cell(last, 1)))
    head = ["reward", *(f"{at:g} nats" for at in AT_KL), "best", "at the end", "KL at the end"]
    return table(head, rows) if rows else NOTHING


def law_table(seeds: Sequence[Record], part: str) -> str:
    """A line a curve and seed: what became of gold, the peak, R², the range."""
    rows = []
    for name in names_in(seeds, part, "curves"):
        for seed in seeds:
            curve = seed["parts"].get(part, {}).get("curves", {}).get(name)
            if curve is not None:
                rows.append((_name(name), str(seed["seed"]), *law_cells(curve["fit"])))
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
            f"best-of-N: {_name(name)}",
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
            f"PPO: {_name(name)} over {_name(single)}",
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
            rows.append((part, cell(mean_over_seeds(seconds), 0), number(max(peaks), 1) if peaks else "–"))
    return table(["part", "seconds a seed", "peak GiB of one run"], rows) if rows else NOTHING


def plots(seeds: Sequence[Record]) -> list[Plot]:
    """Best-of-N and PPO by the number of labels, then with ensembles; gold solid, proxy dashed, the law faint."""
    singles = [name for name in names_in(seeds, "best_of_n", "curves") if name.startswith("single")]
    others = [name for name in names_in(seeds, "best_of_n", "curves") if not name.startswith("single")]
    runs = names_in(seeds, "ppo", "curves")
    compared = [name for name in runs if not name.startswith("single")]
    same = {f"single-{name.rpartition('-')[2]}" for name in compared}
    drawn = [
        panel(seeds, "best_of_n", "Best-of-N", singles, with_proxy=True),
        panel(
            seeds, "ppo", "PPO without a price", [name for name in runs if name.startswith("single")], with_proxy=True
        ),
        panel(
            seeds,
            "best_of_n",
            "Best-of-N: ensembles, gold",
            [*sorted(same & set(singles)), *(name for name in others if f"single-{name.rpartition('-')[2]}" in same)],
            with_proxy=False,
        ),
        panel(seeds, "ppo", "PPO: ensembles, gold", [*sorted(same & set(runs)), *compared], with_proxy=False),
    ]
    return [plot for plot in drawn if plot.series]


def panel(seeds: Sequence[Record], part: str, title: str, names: Sequence[str], *, with_proxy: bool) -> Plot:
    drawn: list[tuple[Series, list[tuple[float, float]]]] = []
    for name, colour in zip(names, COLOURS, strict=False):
        curves = [curve for seed in seeds if (curve := seed["parts"].get(part, {}).get("curves", {}).get(name))]
        if not curves:
            continue
        for curve in curves:
            law = law_places(curve["fit"])
            drawn.append((Series(name=f"{name}: law", colour=colour, values=(), is_faint=True), law))
        gold = average(curves, "gold", is_smoothed=part == "ppo")
        drawn.append((Series(name=_name(name), colour=colour, values=()), gold))
        if with_proxy:
            proxy = average(curves, "proxy", is_smoothed=part == "ppo")
            dashed = Series(name=f"{_name(name)}: proxy", colour=colour, values=(), is_dashed=True, is_named=False)
            drawn.append((dashed, proxy))
    x = sorted({at for _, places in drawn for at, _ in places})
    series = tuple(_on(x, empty, places) for empty, places in drawn if places)
    note = "Solid: gold; dashed: proxy; faint: the fitted law." if with_proxy else "Solid: gold; faint: the fitted law."
    return Plot(title=title, note=note, x_name="√KL", x=x, series=series)


def average(curves: Sequence[Record], key: str, *, is_smoothed: bool) -> list[tuple[float, float]]:
    """The mean over seeds at places along d. Runs of PPO have places of their own: means of five neighbours, read off
    between them, as far as every seed went."""
    if not is_smoothed:
        width = min(len(curve["kl"]) for curve in curves)
        means = np.mean([curve[key][:width] for curve in curves], axis=0)
        return [(math.sqrt(kl), float(value)) for kl, value in zip(curves[0]["kl"], means, strict=False)]
    tracks = [smoothed(curve["kl"], curve[key]) for curve in curves if len(curve["kl"]) >= 5]
    if not tracks:
        return []
    low, high = max(d[0] for d, _ in tracks), min(d[-1] for d, _ in tracks)
    grid = np.linspace(low, high, GRID)
    return [(float(d), float(np.mean([np.interp(d, *track) for track in tracks]))) for d in grid]


def smoothed(kl: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """d and value as means of five neighbours in KL.

    >>> [track.tolist() for track in smoothed([0, 1, 4, 9, 16], [0.0, 1.0, 2.0, 3.0, 4.0])]
    [[2.0], [2.0]]
    """
    order = np.argsort(kl, kind="stable")
    kernel = np.full(5, 0.2)
    d = np.sqrt(np.maximum(np.array(kl, dtype=np.float64)[order], 0.0))
    track = np.array(values, dtype=np.float64)[order]
    return np.convolve(d, kernel, mode="valid"), np.convolve(track, kernel, mode="valid")


def law_places(fit: Record) -> list[tuple[float, float]]:
    if "d_range" not in fit:
        return []
    low, high = fit["d_range"]
    return [(float(d), law_at(fit, float(d))) for d in np.linspace(low, high, GRID)]


def names_in(seeds: Iterable[Record], part: str, key: str) -> list[str]:
    """The names below a part in the order in which seeds have them."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found.update(dict.fromkeys(seed["parts"].get(part, {}).get(key, {}), 1))
    return list(found)


def _on(x: Sequence[float], empty: Series, places: Sequence[tuple[float, float]]) -> Series:
    heights = dict(places)
    return Series(
        name=empty.name,
        colour=empty.colour,
        values=[heights.get(at) for at in x],
        is_faint=empty.is_faint,
        is_dashed=empty.is_dashed,
        is_named=empty.is_named,
    )


def _means(gold: Sequence[float]) -> list[float]:
    """Of five neighbours in the run."""
    width = min(5, len(gold))
    return np.convolve(gold, np.full(width, 1 / width), mode="valid").tolist()


def _name(name: str) -> str:
    """
    >>> _name("single-1000"), _name("worst-300 over one member")
    ('1,000 labels', 'worst case, 300 labels, over one member')
    """
    what, _, against = name.partition(" over ")
    kind, _, labels = what.rpartition("-")
    titles = {
        "single": "",
        "mean": "mean, ",
        "worst": "worst case, ",
        "uncertainty": "uncertainty-weighted, ",
        "ensemble": "ensemble, ",
    }
    words = f"{titles.get(kind, kind)}{int(labels):,} labels"
    other = {"single": "one model"}.get(against, against)
    return f"{words}, over {other}" if against else words


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
