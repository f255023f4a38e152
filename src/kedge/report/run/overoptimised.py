"""Gold against proxy over the distance from the reference, with the fit of Gao et al. 2022 where there is enough."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log10, sqrt
from statistics import fmean

from kedge.monitor.overoptimisation import Fit, NoFit, fit
from kedge.report.charts.decimate import kept_rows
from kedge.report.charts.plot import Plot, Series
from kedge.report.run.records import Record
from kedge.report.words import short

_CURVE_POINTS = 60
_LOOKS = 5


def gold_plot(metrics: Sequence[Record]) -> Plot | None:
    """None where no gold source was given, or it was never measured."""
    rows = [
        (sqrt(record["kl/mean"]), record.get("reward/mean"), record["gold/mean"])
        for record in metrics
        if _is_number(record.get("gold/mean")) and _is_number(record.get("kl/mean")) and record["kl/mean"] >= 0
    ]
    if not rows:
        return None
    found = fit([d * d for d, _, _ in rows], [gold for _, _, gold in rows], kind="rl")
    distance, proxy, gold = (list(column) for column in zip(*sorted(rows, key=lambda row: row[0]), strict=True))
    factor = _factor(proxy, gold)
    kept = kept_rows([gold, proxy])
    scaled = [None if proxy[row] is None else proxy[row] * factor for row in kept]
    return Plot(
        title="Gold against proxy",
        note=" ".join(
            (
                "Where the proxy goes on climbing and gold turns down, the reward is being exploited.",
                *_fallen(metrics),
                _words(found),
            )
        ),
        x_name="√KL",
        x=[distance[row] for row in kept],
        series=(
            Series(
                name="proxy" if factor == 1 else f"proxy × {factor:g}", colour="first", values=scaled, is_dotted=True
            ),
            Series(name="gold", colour="second", values=[gold[row] for row in kept], is_dotted=True),
        ),
        curve=_curve(found, distance[-1]) if isinstance(found, Fit) else (),
        curve_name="fit",
    )


def _fallen(metrics: Sequence[Record]) -> list[str]:
    """Where gold was best and how far it fell, as a sentence, by means of a few looks: of single ones, the luckiest
    would be the best. None where there are too few, or the best is at the end."""
    seen = [one for one in metrics if _is_number(one.get("gold/mean")) and _is_number(one.get("kl/mean"))]
    parts = [seen[at : at + _LOOKS] for at in range(len(seen) - _LOOKS + 1)]
    if len(parts) <= _LOOKS:
        return []
    gold = [fmean(one["gold/mean"] for one in part) for part in parts]
    best = max(range(len(gold)), key=gold.__getitem__)
    if best == len(gold) - 1:
        return []
    kl = fmean(one["kl/mean"] for one in parts[best])
    where = f"at step {parts[best][-1]['step']}, at a KL of {kl:.3g} nats"
    return [f"Means of {_LOOKS} looks: gold was best {where}, {gold[best]:.3g}, and is {gold[-1]:.3g} at the end."]


def _curve(found: Fit, furthest: float) -> tuple[tuple[float, float], ...]:
    """From the reference to a little beyond the run, and to the peak where that is near."""
    end = 1.05 * max(furthest, min(sqrt(found.peak_kl), 1.5 * furthest))
    places = [end * (at + 1) / _CURVE_POINTS for at in range(_CURVE_POINTS)]
    return tuple((d, found.predicted(d)) for d in places)


def _words(found: Fit | NoFit) -> str:
    if isinstance(found, NoFit):
        return f"Overoptimisation is not fitted: {found.reason}."
    low, high = found.peak_kl_interval
    here = f"this run is at {short(found.kl)}, " + ("past the peak" if found.is_past_peak else "before the peak")
    return (
        f"Fitted R(d) = start + d (α − β ln d) with d = √KL: α = {found.alpha:.3g}, β = {found.beta:.3g}. "
        f"Gold is predicted to peak at a KL of {found.peak_kl:.3g} nats a sequence "
        f"(95 % interval {low:.3g} to {high:.3g}); {here}."
    )


def _factor(proxy: Sequence[float | None], gold: Sequence[float]) -> float:
    """A power of ten that brings the proxy near the scale of gold, so that both can be seen; mostly 1.

    >>> _factor([0.0, 100.0], [0.0, 2.0]), _factor([0.0, 3.0], [0.0, 1.0])
    (0.01, 1.0)
    """
    given = [value for value in proxy if value is not None and isfinite(value)]
    if not given:
        return 1.0
    sizes = max(given) - min(given), max(gold) - min(gold)
    if 0 in sizes or 0.2 <= sizes[1] / sizes[0] <= 5:
        return 1.0
    return 10.0 ** round(log10(sizes[1] / sizes[0]))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)
