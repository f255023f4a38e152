"""What a chart shows, before it is drawn: curves, points with intervals, bars, thresholds and events; decimation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kedge.core.findings import Level
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
    is_dotted: bool = False
    """Single dots, not a line: for points that have no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A dot with an interval up and down; `title` is shown under the pointer."""

    x: float
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """From `low` to `high` across; `title` is shown under the pointer."""

    low: float
    high: float
    height: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The bars of one histogram; several in one chart show through each other."""

    name: str
    colour: Colour
    bars: tuple[Bar, ...]


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
    records: Sequence[Mapping[str, float]],
    names: Mapping[str, str],
    *,
    title: str,
    note: str,
    spread: str | None = None,
    thresholds: tuple[Threshold, ...] = (),
    marks: tuple[Mark, ...] = (),
) -> Plot | None:
    """The plot of some metrics, by their names in the records and in the legend; None where none was ever logged."""
    logged = [name for name in names if any(name in record for record in records)]
    rows = [record for record in records if any(name in record for name in logged)]
    if not logged or not rows:
        return None
    columns = {name: [record.get(name) for record in rows] for name in logged}
    shown = decimated_rows(list(columns.values()))
    around = [rows[row].get(spread) for row in shown] if spread else None
    return Plot(
        title=title,
        note=note,
        x_name="step",
        x=[rows[row]["step"] for row in shown],
        series=tuple(
            Series(
                name=names[name],
                colour=COLOURS[place % len(COLOURS)],
                values=[columns[name][row] for row in shown],
                spread=around if place == 0 and around and any(value is not None for value in around) else None,
            )
            for place, name in enumerate(logged)
        ),
        thresholds=thresholds,
        marks=marks,
    )


def decimated_rows(columns: Sequence[Column], most: int = MOST_POINTS) -> list[int]:
    """Rows, at most `most` of them, that show all columns: the first and last row, and the extremes of each stretch.

    A column has None where it has no value, and NaN or infinity where a value was not finite. Of each stretch of rows
    the lowest, the highest and one value that is not finite stay, so no spike is lost.

    >>> decimated_rows([[0.0, 5.0, 1.0, 2.0, -7.0, 3.0, 2.0, 2.5, 2.0, 4.0]], most=8)
    [0, 1, 4, 6, 9]
    """
    num_rows = len(columns[0]) if columns else 0
    if num_rows <= most:
        return list(range(num_rows))
    rows_to_keep = {0, num_rows - 1}
    num_stretches = max(1, (most - 2) // (3 * len(columns)))
    for stretch in range(num_stretches):
        rows = range(stretch * num_rows // num_stretches, (stretch + 1) * num_rows // num_stretches)
        for column in columns:
            rows_to_keep.update(_extreme_rows(column, rows))
    return sorted(rows_to_keep)


def _extreme_rows(column: Column, rows: range) -> list[int]:
    """The rows of the lowest and the highest value, and the first one whose value is not finite."""
    given = [(value, row) for row in rows if (value := column[row]) is not None]
    finite = [(value, row) for value, row in given if math.isfinite(value)]
    bad = [row for value, row in given if not math.isfinite(value)][:1]
    return [min(finite)[1], max(finite)[1], *bad] if finite else bad
