"""Gold wins over KL in the study `harmless`: curves, every method at equal KL, the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from common import Estimate, Record, estimates, mean_over_seeds, numbers, over_seeds
from drawing import dots, lines
from kedge.report.charts.plot import Plot

TRADE = ("harmbench.complied", "xstest.refused_safe")
TAX = ("ifeval.prompt_strict", "piqa.cloze", "mmlu.cloze")
METHODS = ("ppo", "dpo")
"""That take exams, beside the start."""
Places = Sequence[tuple[float, Estimate]]


def merged(seeds: Sequence[Record], *path: str) -> Estimate | None:
    """The estimate at a place over the seeds that have it."""
    found = estimates(seeds, *path)
    return over_seeds(found) if found else None


def mean_of(seeds: Sequence[Record], *path: str) -> Estimate | None:
    found = numbers(seeds, *path)
    return mean_over_seeds(found) if found else None


def sizes(seeds: Sequence[Record]) -> list[str]:
    """The n of best-of-N."""
    found = {n for record in seeds for n in record["parts"].get("best", {}).get("best_of", {})}
    return sorted(found, key=int)


def curves(seeds: Sequence[Record], task: str) -> dict[str, list[tuple[float, Estimate]]]:
    """By method, its win rates by gold over their KL, from the start on; means over the seeds."""
    start = (0.0, Estimate(value=0.5, low=0.5, high=0.5, count=len(seeds)))
    runs = {name for record in seeds for name in record["parts"].get("answers", {}).get("methods", {})}
    groups = {"PPO": ["ppo"], "DPO": sorted(name for name in runs if name.startswith("dpo-"))}
    found: dict[str, list[tuple[float, Estimate]]] = {}
    for label, names in groups.items():
        each = [
            (merged(seeds, "answers", "methods", n, "tasks", task, "kl"),
             merged(seeds, "answers", "methods", n, "tasks", task, "gold_wins"))
            for n in names
        ]  # fmt: skip
        found[label] = [start, *sorted(((max(kl.value, 0.0), wins) for kl, wins in each if kl and wins), key=_kl)]
    best = [(mean_of(seeds, "best", "best_of", n, "kl"), n) for n in sizes(seeds)]
    wins = {n: merged(seeds, "best", "best_of", n, "tasks", task, "gold_wins") for _, n in best}
    found["best-of-N"] = [start, *((kl.value, own) for kl, n in best if kl and (own := wins[n]))]
    return {label: places for label, places in found.items() if len(places) > 1}


def _kl(place: tuple[float, Estimate]) -> float:
    return place[0]


def at_kl(places: Places, kl: float) -> Estimate | None:
    """A win rate at a KL between two that were measured: linear in the root of the KL, as Gao et al. draw it.

    >>> start, end = (Estimate(value=v, low=v - w, high=v + w, count=1) for v, w in ((0.5, 0.0), (0.7, 0.1)))
    >>> at_kl([(0.0, start), (4.0, end)], 1.0)
    Estimate(value=0.6, low=0.55, high=0.65, count=1)
    """
    for (left, low), (right, high) in pairwise(places):
        if left <= kl <= right and right > left:
            share = (math.sqrt(kl) - math.sqrt(left)) / (math.sqrt(right) - math.sqrt(left))
            ends = [(1 - share) * getattr(low, name) + share * getattr(high, name) for name in ("value", "low", "high")]
            return Estimate(value=round(ends[0], 6), low=round(ends[1], 6), high=round(ends[2], 6), count=high.count)
    return None


def equal_kl(seeds: Sequence[Record], task: str) -> float:
    """The largest KL that all methods have reached in all seeds."""
    return min((common_kl(found) for record in seeds if (found := curves([record], task))), default=0.0)


def common_kl(by_method: Mapping[str, Places]) -> float:
    """The largest KL that all methods have reached."""
    return min((max(kl for kl, _ in places) for places in by_method.values()), default=0.0)


def at_equal_kl(seeds: Sequence[Record], task: str) -> dict[str, Estimate]:
    """Gold wins of each method at the KL that all have reached, read in each seed by itself: the runs of a method end
    at another KL in each, and a mean over them would be of no KL at all."""
    kl = equal_kl(seeds, task)
    by_seed = [curves([record], task) for record in seeds]
    found: dict[str, Estimate] = {}
    for label in dict.fromkeys(label for own in by_seed for label in own):
        wins = [at for own in by_seed if label in own and (at := at_kl(own[label], kl)) is not None]
        if wins:
            found[label] = over_seeds(wins)
    return found


def plots(seeds: Sequence[Record]) -> list[Plot]:
    """Gold wins over the root of the KL for either task, and what the exams lost or gained."""
    found = [
        lines(
            f"Gold wins over SFT, {task} prompts",
            "√KL, nats",
            {label: [(math.sqrt(kl), e.value) for kl, e in places] for label, places in curves(seeds, task).items()},
        )
        for task in ("harmless", "helpful")
        if curves(seeds, task)
    ]
    keys = [
        key for key in (*TRADE, *TAX) if merged(seeds, "exams", "results", key, "changes", "ppo") is not None
    ] or _first_exams(seeds)
    if keys:
        groups = {
            name.upper(): [merged(seeds, "exams", "results", key, "changes", name) for key in keys] for name in METHODS
        }
        found.append(dots("Exams: change from SFT", [key.partition(".")[0] for key in keys], groups))
    return found


def _first_exams(seeds: Sequence[Record]) -> list[str]:
    keys = [key for record in seeds for key in record["parts"].get("exams", {}).get("results", {})]
    return list(dict.fromkeys(keys))[:3]
