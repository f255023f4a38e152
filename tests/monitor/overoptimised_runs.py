"""Ten seeds of `kedge demo --overoptimise`, as the KL, gold and proxy of each step, and what must be said of each.

In all of them the truth rises, peaks, and falls by several units. CASES and `attempt` are data for other programs too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from kedge.monitor.overoptimisation import Fit, fit
from kedge.report.run.overoptimisation import gold_plot

Points = Sequence[tuple[float, float, float]]

RUNS: dict[str, Points] = json.loads((Path(__file__).parent / "overoptimised_seeds.json").read_text())
CASES = tuple(RUNS)


def attempt(case: str) -> str | None:
    """None where all that is said of the seed is true; else what is not."""
    return untrue(RUNS[case])


def untrue(points: Points) -> str | None:
    """What the fit or the report says of a run that is not so; None where nothing is. The truth is found otherwise than
    by the fit: a running median over KL."""
    in_order = sorted(points)
    middles = [median(gold for _, gold, _ in in_order[at : at + 7]) for at in range(len(in_order) - 6)]
    best_kl = in_order[max(range(len(middles)), key=middles.__getitem__) + 3][0]
    end = fmean(gold for _, gold, _ in points[-5:])
    curve = fit([kl for kl, _, _ in points], [gold for _, gold, _ in points], kind="rl")
    rows = [{"kl/mean": kl, "gold/mean": gold, "reward/mean": proxy} for kl, gold, proxy in points]
    plot = gold_plot(rows)
    assert plot is not None
    observed = curve.observed
    if observed is None or not observed.has_fallen:
        return f"gold went from {max(middles):.3g} to {end:.3g}, and is not said to have fallen"
    if not observed.kl_interval[0] <= best_kl <= observed.kl_interval[1]:
        return f"gold peaked at {best_kl:.3g} nats, outside of {observed.kl_interval}"
    if "has fallen to" not in plot.note or "not bend down yet" in plot.note:
        return f"the report does not say that gold has fallen: {plot.note}"
    if isinstance(curve, Fit):
        low, high = curve.peak_kl_interval
        if high < observed.kl_interval[0] or low > observed.kl_interval[1]:
            return f"the law peaks between {low:.3g} and {high:.3g}, and gold did between {observed.kl_interval}"
    elif "beyond a KL of" not in curve.reason and "otherwise than by the law" not in curve.reason:
        return f"no fit, for a reason that is none: {curve.reason}"
    return None
