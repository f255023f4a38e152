"""The figure of the study of overoptimisation: gold, proxies and laws over √KL, from the files of its seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from common import Record
from kedge.report.charts.plot import COLOURS, Plot, Series
from overoptimisation_curves import law_at

GRID = 40
"""Places along √KL at which the runs of several seeds are averaged."""


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
        drawn.append((Series(name=title_of(name), colour=colour, values=()), gold))
        if with_proxy:
            proxy = average(curves, "proxy", is_smoothed=part == "ppo")
            dashed = Series(name=f"{title_of(name)}: proxy", colour=colour, values=(), is_dashed=True, is_named=False)
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


def names_in(seeds: Iterable[Record], part: str, key: str) -> list[str]:
    """The names below a part in the order in which seeds have them."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found.update(dict.fromkeys(seed["parts"].get(part, {}).get(key, {}), 1))
    return list(found)


def title_of(name: str) -> str:
    """
    >>> title_of("single-1000"), title_of("worst-300 over one member")
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
