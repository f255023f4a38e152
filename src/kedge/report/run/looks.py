"""Charts of the looks that a run took at its policy: exams against the start, and a judge's win rate over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from kedge.core.metric_table import MetricTable, as_table
from kedge.report.charts.plot import COLOURS, Colour, Mark, Plot, Point, Series, Threshold, over_steps
from kedge.report.run.run_records import Record, StageRecord

_MAIN = "/worse"
_APART = 0.012
"""Of the width of the chart: the dots of several exams at one look stand beside each other, the last at its step."""


def look_plots(stage: StageRecord, marks: tuple[Mark, ...] = ()) -> Iterator[Plot]:
    """The change of the first metric of each exam, above 0 where it is better; and the win rate."""
    table = as_table(stage.metrics)
    mains = [name.removesuffix(_MAIN) for name in table.names if name.startswith("exam/") and name.endswith(_MAIN)]
    if mains:
        yield _exams(table, mains, stage.looks or {}, marks)
    if "judge/win_rate" in table.names:
        yield _win_rate(table, marks)


def detail_plots(stage: StageRecord) -> Iterator[Plot]:
    """All metrics of each exam as they are."""
    by_exam: dict[str, dict[str, str]] = {}
    for name in as_table(stage.metrics).names:
        parts = name.split("/")
        if parts[0] == "exam" and len(parts) == 3:
            by_exam.setdefault(parts[1], {})[name] = parts[2]
    for exam, names in by_exam.items():
        if plot := over_steps(stage.metrics, names, title=f"Exam {exam}", note=""):
            yield plot


def _exams(table: MetricTable, mains: Sequence[str], facts: Record, marks: tuple[Mark, ...]) -> Plot:
    rows = {name: _looks(table, f"{name}/change") for name in mains}
    steps = sorted({0.0, *(step for looks in rows.values() for step in looks)})
    series: list[Series] = []
    points: list[Point] = []
    for place, name in enumerate(mains):
        colour: Colour = COLOURS[place % len(COLOURS)]
        sign = -1 if _is_less_better(facts, name) else 1
        exam = name.removeprefix("exam/").replace("/", ".")
        changes: dict[float, float] = {0.0: 0.0} | {step: sign * change for step, change in rows[name].items()}
        legend = exam if sign == 1 else f"{exam}, turned round"
        series.append(Series(name=legend, colour=colour, values=[changes.get(step) for step in steps]))
        low, high, value = (_looks(table, f"{name}{part}") for part in ("/change/low", "/change/high", ""))
        shift = (place - len(mains) + 1) * _APART * steps[-1]
        points += [
            Point(
                x=step + shift,
                y=sign * change,
                low=min(sign * low[step], sign * high[step]),
                high=max(sign * low[step], sign * high[step]),
                title=f"step {step:g}, {exam}: {value[step]:.3f}, {change:+.3f} [{low[step]:+.3f}, {high[step]:+.3f}]",
                colour=colour,
            )
            for step, change in rows[name].items()
        ]
    return Plot(
        title="Exams against the start",
        note="Change of each exam on the same items, with its 95 % interval; above 0 is better. What lies below 0 with "
        "its whole interval, look after look, is the price of the reward: the alignment tax.",
        x_name="step",
        x=steps,
        series=tuple(series),
        points=tuple(points),
        thresholds=(Threshold(value=0.0, name="start", kind="target"),),
        marks=marks,
    )


def _win_rate(table: MetricTable, marks: tuple[Mark, ...]) -> Plot:
    rate = _looks(table, "judge/win_rate")
    low, high = _looks(table, "judge/win_rate/low"), _looks(table, "judge/win_rate/high")
    steps = list(rate)
    return Plot(
        title="Win rate over the start",
        note="By the judge, in both orders, on the same prompts at every look, with its 95 % interval. Where it falls "
        "while the reward climbs, the reward is being exploited.",
        x_name="step",
        x=steps,
        series=(Series(name="win rate", colour="first", values=list(rate.values())),),
        points=tuple(
            Point(
                x=step,
                y=rate[step],
                low=low[step],
                high=high[step],
                title=f"step {step:g}: {rate[step]:.1%} [{low[step]:.1%}, {high[step]:.1%}]",
            )
            for step in steps
        ),
        thresholds=(Threshold(value=0.5, name="no better", kind="target"),),
        marks=marks,
    )


def _looks(table: MetricTable, name: str) -> dict[float, float]:
    """The values of a metric by step, where it was measured."""
    values = zip(table.values("step").tolist(), table.values(name).tolist(), strict=True)
    return {step: value for step, value in values if isfinite(value)}


def _is_less_better(facts: Record, name: str) -> bool:
    """By the facts of the exams; what is not known is taken as better the higher it is."""
    _, exam, metric = name.split("/")
    about: Any = facts
    for key in ("exams", exam, "metrics", metric):
        about = about.get(key, {})
    return about.get("better") == "less"
