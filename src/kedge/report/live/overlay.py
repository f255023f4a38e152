"""Metrics that the reader picked, of one run or of several, in one chart: to see what moves together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kedge.core.metric_table import Floats, as_table
from kedge.report.charts.plot import COLOURS, Plot, Series, decimated, smoothed
from kedge.report.run.run_records import StageRecord
from kedge.report.words import short

MOST_LINES = len(COLOURS)
_POINTS = 300
"""Of one line."""
_NOT_PICKED = ("step", "at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """`smoothing` is the number of steps that a mean is taken over. Scaled lines go from 0 to 1, each by itself.
    `first` and `last` are the steps that are drawn; None is as far as there are some."""

    metrics: tuple[str, ...]
    smoothing: int = 1
    is_scaled: bool = False
    first: float | None = None
    last: float | None = None


def metric_names(stages: Sequence[StageRecord]) -> list[str]:
    """What can be picked: everything that any of these stages has logged."""
    names = dict.fromkeys(name for stage in stages for name in as_table(stage.metrics).names)
    return [name for name in names if name not in _NOT_PICKED]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    steps: Floats
    values: Floats


def overlay(stages: Sequence[tuple[str, StageRecord]], picked: Picked) -> Plot | None:
    """The chart of the picked metrics of stages, each under the name of its run; None where none of them was logged."""
    lines = [
        line for metric in picked.metrics for name, stage in stages if (line := _line(name, stage, metric, stages))
    ]
    left_out = len(lines) - MOST_LINES
    drawn = [part for line in lines[:MOST_LINES] if len((part := _drawn(line, picked)).steps)]
    if not drawn:
        return None
    x = sorted({step for line in drawn for step in line.steps.tolist()})
    return Plot(
        title=", ".join(picked.metrics),
        note=f"{left_out} more lines have no colour left: pick fewer metrics." if left_out > 0 else "",
        x_name="step",
        x=[int(step) if step.is_integer() else step for step in x],
        series=tuple(
            Series(name=line.name, colour=COLOURS[place], values=_at(x, line)) for place, line in enumerate(drawn)
        ),
    )


def _line(name: str, stage: StageRecord, metric: str, stages: Sequence[tuple[str, StageRecord]]) -> _Line | None:
    table = as_table(stage.metrics)
    rows, values = table.column(metric)
    if not len(rows):
        return None
    label = metric if len(stages) == 1 else f"{name} {metric}"
    return _Line(name=label, steps=table.values("step")[rows], values=values)


def _drawn(line: _Line, picked: Picked) -> _Line:
    low = -np.inf if picked.first is None else picked.first
    high = np.inf if picked.last is None else picked.last
    is_drawn = (line.steps >= low) & (line.steps <= high)
    values, name = smoothed(line.values, picked.smoothing)[is_drawn], line.name
    line = _Line(name=name, steps=line.steps[is_drawn], values=values)
    finite = values[np.isfinite(values)]
    if picked.is_scaled and len(finite):
        low, high = float(finite.min()), float(finite.max())
        values = (values - low) / (high - low) if high > low else np.where(np.isfinite(values), 0.5, values)
        name = f"{name} ({short(low)} to {short(high)})"
    rows = decimated([(values, np.ones(len(values), dtype=np.bool_))], _POINTS)
    return _Line(name=name, steps=line.steps[rows], values=values[rows])


def _at(x: Sequence[float], line: _Line) -> list[float | None]:
    values = dict(zip(line.steps.tolist(), line.values.tolist(), strict=True))
    return [values.get(step) for step in x]
