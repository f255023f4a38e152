"""Overoptimisation: gold against proxy over the distance from the reference, with the fit of Gao et al. 2022."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log10, sqrt

import numpy as np

from kedge.core.metric_table import as_table
from kedge.monitor.gold_peak import LOOKS
from kedge.monitor.overoptimisation import Fit, NoFit, fit
from kedge.report.charts.plot import Curve, Plot, Series, decimated_rows
from kedge.report.run.run_records import Record
from kedge.report.words import short

_CURVE_POINTS = 60


def gold_plot(metrics: Sequence[Record]) -> Plot | None:
    """None where no gold source was given, or it was never measured."""
    measured = [row for row in _measured(metrics) if row.kl >= 0]
    if not measured:
        return None
    fitted = fit([row.kl for row in measured], [row.gold for row in measured], kind="rl")
    by_distance = sorted(measured, key=lambda row: row.kl)
    distance = [sqrt(row.kl) for row in by_distance]
    proxy, gold = [row.reward for row in by_distance], [row.gold for row in by_distance]
    factor = _factor(proxy, gold)
    shown = decimated_rows([gold, proxy])
    scaled = [None if (value := proxy[row]) is None else value * factor for row in shown]
    return Plot(
        title="Gold against proxy",
        note=" ".join(
            (
                "Where the proxy goes on climbing and gold turns down, the reward is being exploited.",
                *_observed_in_words(fitted),
                _fit_in_words(fitted),
            )
        ),
        x_name="√KL",
        x=[distance[row] for row in shown],
        series=(
            Series(
                name="proxy" if factor == 1 else f"proxy × {factor:g}", colour="first", values=scaled, is_dotted=True
            ),
            Series(name="gold", colour="second", values=[gold[row] for row in shown], is_dotted=True),
        ),
        curve=_curve(fitted, distance[-1]) if isinstance(fitted, Fit) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A step at which gold was measured, with a finite KL."""

    kl: float
    gold: float
    reward: float | None


def _measured(metrics: Sequence[Record]) -> list[_Measured]:
    table = as_table(metrics)
    rows = np.isfinite(table.values("kl/mean")) & np.isfinite(table.values("gold/mean"))
    columns = (table.values(name)[rows].tolist() for name in ("kl/mean", "gold/mean", "reward/mean"))
    has_reward = table.present("reward/mean")[rows].tolist()
    return [
        _Measured(kl=kl, gold=gold, reward=reward if is_there else None)
        for kl, gold, reward, is_there in zip(*columns, has_reward, strict=True)
    ]


def _observed_in_words(fitted: Fit | NoFit) -> list[str]:
    """Where gold was best and how far it fell, as a sentence; none where it was measured too seldom."""
    if fitted.observed is None:
        return []
    return [f"By means of {LOOKS} looks, {fitted.observed.in_words()}."]


def _curve(fitted: Fit, furthest: float) -> Curve:
    """From the reference to where the law no longer holds; where it does throughout, to a little beyond the run, and to
    the peak where that is near."""
    end = 1.05 * max(furthest, min(sqrt(fitted.peak_kl), 1.5 * furthest))
    if fitted.holds_until is not None:
        end = sqrt(fitted.holds_until)
    distances = [end * (at + 1) / _CURVE_POINTS for at in range(_CURVE_POINTS)]
    return Curve(name="fit", places=tuple((d, fitted.law.predicted(d)) for d in distances))


def _fit_in_words(fitted: Fit | NoFit) -> str:
    if isinstance(fitted, NoFit):
        return f"The law of overoptimisation shows no peak: {fitted.in_words()}."
    low, high = fitted.peak_kl_interval
    here = f"this run is at {short(fitted.kl)}, " + ("past the peak" if fitted.is_past_peak else "before the peak")
    law = f"R(d) = start + d (α − β ln d) with d = √KL, α = {fitted.law.alpha:.3g}, β = {fitted.law.beta:.3g}"
    return (
        f"Fitted {law}: {fitted.in_words()}. Gold is predicted to peak at a KL of {fitted.peak_kl:.3g} nats a sequence "
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
