"""What a chart shows, before it is drawn: curves, points with intervals, bars, thresholds and events; decimation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kedge.core.findings import Level
from kedge.core.metric_table import Flags, Floats, Rows, as_table
from kedge.report.charts.axes import Axis

MOST_POINTS = 500
"""About one a pixel of a chart, also on a wide screen."""

Column = Sequence[float | None]
Place = tuple[float, float]
Colour = Literal["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ink"]
COLOURS: tuple[Colour, ...] = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""In the order in which the lines of a chart get them; `chart.css` says what they are in light and in dark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One value a row; None where there is none. `spread` is drawn as a band around it."""

    name: str
    colour: Colour
    values: Column
    spread: Column | None = None
    is_named: bool = True
    """Whether the legend has it: the points of a line that is named need no name of their own."""
    is_faint: bool = False
    """What a smoothed line was made of: in its colour, behind it, without a name."""
    is_dotted: bool = False
    """Single dots, not a line: for points that have no order."""
    is_dashed: bool = False
    """A dashed line, for what stands beside the lines that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A dot with an interval up and down, and across where `left` and `right` are given; `title` is shown under the
    pointer, `label` beside the dot."""

    x: float
    y: float
    low: float
    high: float
    title: str
    left: float | None = None
    right: float | None = None
    label: str = ""
    colour: Colour = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """From `low` to `high` across; `title` is shown under the pointer."""

    low: float
    high: float
    height: float
    title: str
    base: float | None = None
    """Where it begins, for bars that stand on others; None is the bottom of the chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The bars of one histogram; several in one chart show through each other, unless they stand on one another."""

    name: str
    colour: Colour
    bars: tuple[Bar, ...]

    @property
    def is_stacked(self) -> bool:
        return any(bar.base is not None for bar in self.bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A dashed line of its own, such as a fit."""

    name: str
    places: tuple[Place, ...]
    colour: Colour = "third"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A level that the values are compared with."""

    value: float
    name: str
    kind: Literal["target", "limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at a place of the x axis."""

    x: float
    level: Level
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One chart. `series` have a value for each of `x`, which rises; everything else has places of its own."""

    title: str
    note: str
    x_name: str
    x: Sequence[float] = ()
    series: tuple[Series, ...] = ()
    points: tuple[Point, ...] = ()
    bars: tuple[Bars, ...] = ()
    curve: Curve | None = None
    thresholds: tuple[Threshold, ...] = ()
    marks: tuple[Mark, ...] = ()
    guides: tuple[tuple[Place, Place], ...] = ()
    """Dashed straight lines to compare with, such as a diagonal."""
    across: Axis | None = None
    """Both axes are fitted to the values where they are not given."""
    up: Axis | None = None


def over_steps(
    records: Rows,
    names: Mapping[str, str],
    *,
    title: str,
    note: str,
    spread: str | None = None,
    thresholds: tuple[Threshold, ...] = (),
    marks: tuple[Mark, ...] = (),
    smoothing: int = 1,
) -> Plot | None:
    """The plot of some metrics, by their names in the records and in the legend; None where none was ever logged.

    `smoothing` is the number of steps that a mean is taken over; above 1, the values themselves are drawn faintly.
    """
    table = as_table(records)
    logged = [name for name in names if name in table.names]
    if not logged:
        return None
    rows = np.flatnonzero(np.any([table.present(name) for name in logged], axis=0))
    columns = [(table.values(name)[rows], table.present(name)[rows]) for name in logged]
    shown = rows[decimated(columns, MOST_POINTS)]
    around = _as_column(table.values(spread)[shown], table.present(spread)[shown]) if spread else None
    series = [
        Series(
            name=names[name],
            colour=COLOURS[place % len(COLOURS)],
            values=_as_column(table.values(name)[shown], table.present(name)[shown]),
            spread=around if place == 0 and around and any(value is not None for value in around) else None,
            is_faint=smoothing > 1,
        )
        for place, name in enumerate(logged)
    ]
    if smoothing > 1:
        means = [smoothed(table.values(name), smoothing)[shown] for name in logged]
        series += [
            replace(line, values=_as_column(mean, table.present(name)[shown]), spread=None, is_faint=False)
            for line, mean, name in zip(series, means, logged, strict=True)
        ]
    return Plot(
        title=title,
        note=note,
        x_name="step",
        x=[int(step) if step.is_integer() else step for step in table.values("step")[shown].tolist()],
        series=tuple(series),
        thresholds=thresholds,
        marks=marks,
    )


def smoothed(values: Floats, width: int) -> Floats:
    """Means of the last `width` finite values, the first ones of as many as there are; what is not finite stays.

    >>> smoothed(np.array([1.0, 3.0, np.nan, 8.0]), 2).tolist()
    [1.0, 2.0, nan, 5.5]
    """
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    if width <= 1 or not len(finite):
        return values
    centre = finite.mean()
    sums = np.cumsum(np.concatenate([[0.0], finite - centre]))
    ends = np.arange(1, len(finite) + 1)
    starts = np.maximum(0, ends - width)
    means = values.copy()
    means[is_finite] = centre + (sums[ends] - sums[starts]) / (ends - starts)
    return means


def decimated_rows(columns: Sequence[Column], most: int = MOST_POINTS) -> list[int]:
    """Rows, at most `most` of them, that show all columns: the first and last row, and the extremes of each stretch.

    A column has None where it has no value, and NaN or infinity where a value was not finite. Of each stretch of rows
    the lowest, the highest and one value that is not finite stay, so no spike is lost.

    >>> decimated_rows([[0.0, 5.0, 1.0, 2.0, -7.0, 3.0, 2.0, 2.5, 2.0, 4.0]], most=8)
    [0, 1, 4, 6, 9]
    """
    given = [[np.nan if value is None else value for value in column] for column in columns]
    has_value = [[value is not None for value in column] for column in columns]
    arrays = [
        (np.array(values, dtype=np.float64), np.array(flags, dtype=np.bool_))
        for values, flags in zip(given, has_value, strict=True)
    ]
    return decimated(arrays, most)


def decimated(columns: Sequence[tuple[Floats, Flags]], most: int) -> list[int]:
    """`decimated_rows` of values with whether there is one."""
    num_rows = len(columns[0][0]) if columns else 0
    if num_rows <= most:
        return list(range(num_rows))
    rows_to_keep = {0, num_rows - 1}
    num_stretches = max(1, (most - 2) // (3 * len(columns)))
    width = -(-num_rows // num_stretches)
    for values, present in columns:
        is_finite = np.isfinite(values)
        for line, has_value in (
            (np.where(is_finite, -values, -np.inf), is_finite),
            (np.where(is_finite, values, -np.inf), is_finite),
            (present & ~is_finite, present & ~is_finite),
        ):
            rows_to_keep.update(_highest_rows(line, has_value, width))
    return sorted(rows_to_keep)


def _highest_rows(line: Floats | Flags, has_value: Flags, width: int) -> list[int]:
    """The row of the highest value in each stretch of so many rows, where it has any."""
    padding = (0, -len(line) % width)
    stretches = np.pad(line, padding, constant_values=line.dtype.type(-np.inf if line.dtype.kind == "f" else 0))
    rows = stretches.reshape(-1, width).argmax(axis=1) + width * np.arange(len(stretches) // width)
    return rows[has_value[rows]].tolist()


def _as_column(values: Floats, present: Flags) -> Column:
    return [value if is_there else None for value, is_there in zip(values.tolist(), present.tolist(), strict=True)]
