"""What a chart shows, before it is drawn: columns over steps, levels to keep to, events at a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kedge.core.findings import Level
from kedge.report.charts.decimate import Column, kept_rows

Colour = Literal["first", "second", "third"]
COLOURS: tuple[Colour, ...] = ("first", "second", "third")


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
class Threshold:
    """A level that the values are held against."""

    value: float
    name: str
    kind: Literal["target", "limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a place of the x axis."""

    x: float
    level: Level
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Columns over one x column, which rises. `curve` is a line of its own, such as a fit."""

    title: str
    note: str
    x_name: str
    x: Sequence[float]
    series: tuple[Series, ...]
    thresholds: tuple[Threshold, ...] = ()
    marks: tuple[Mark, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    curve_name: str = ""


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
    found = [name for name in names if any(name in record for record in records)]
    rows = [record for record in records if any(name in record for name in found)]
    if not found or not rows:
        return None
    columns = {name: [record.get(name) for record in rows] for name in found}
    kept = kept_rows(list(columns.values()))
    around = [rows[row].get(spread) for row in kept] if spread else None
    return Plot(
        title=title,
        note=note,
        x_name="step",
        x=[rows[row]["step"] for row in kept],
        series=tuple(
            Series(
                name=names[name],
                colour=COLOURS[at % len(COLOURS)],
                values=[columns[name][row] for row in kept],
                spread=around if at == 0 and around and any(value is not None for value in around) else None,
            )
            for at, name in enumerate(found)
        ),
        thresholds=thresholds,
        marks=marks,
    )
