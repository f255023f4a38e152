"""A plot as inline SVG that is complete without a script; `chart.js` beside it adds the values under the pointer.

Everything that comes from data is escaped. y grows downwards, as in SVG.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from math import isfinite
from typing import Any

from markupsafe import Markup

from kedge.core.findings import Level
from kedge.report.charts.axes import Axis, value_axis, whole_axis
from kedge.report.charts.decimate import Column
from kedge.report.charts.plot import Mark, Plot, Series
from kedge.report.words import short

WIDTH, HEIGHT = 360.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 348.0, 14.0, 172.0
_LETTER = 6.2
"""Width of a digit in labels."""
_MARK_WIDTH = 7.0
"""Events nearer to each other than this are one mark."""
_WORST_FIRST: tuple[Level, ...] = ("fatal", "warning", "info", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * self.across.share(value), 1)

    def y(self, value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * self.up.share(value), 1)

    def has(self, value: float) -> bool:
        return isfinite(value) and (value > 0 or not self.up.is_log)


def figure(plot: Plot) -> Markup:
    """Title, chart, legend and caption; the values for `chart.js` are in an attribute."""
    plane = _Plane(across=whole_axis([*plot.x, *(x for x, _ in plot.curve)]), up=value_axis(_heights(plot)))
    scale = Markup(' <span class="soft">(log scale)</span>') if plane.up.is_log else ""
    return Markup(
        '<figure class="card chart"><h3>{title}{scale}</h3>{legend}'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}" tabindex="0" data-hover="{hover}">'
        '{drawing}<line class="cursor" x1="0" y1="{top}" x2="0" y2="{bottom}" visibility="hidden"/></svg>'
        '<output class="reading" aria-live="polite"></output>{note}</figure>'
    ).format(
        title=plot.title,
        scale=scale,
        legend=_legend(plot),
        width=WIDTH,
        height=HEIGHT,
        summary=_summary(plot),
        hover=json.dumps(_hover(plot, plane), separators=(",", ":")),
        drawing=_drawing(plot, plane),
        top=_TOP,
        bottom=_BOTTOM,
        note=_caption(plot),
    )


def script() -> Markup:
    """The few lines that show values under the pointer; ours, not data."""
    return Markup(files("kedge.report.charts").joinpath("chart.js").read_text(encoding="utf-8"))


def _heights(plot: Plot) -> list[float]:
    found = [value for series in plot.series for value in series.values if value is not None]
    for series in plot.series:
        around = zip(series.values, series.spread or (), strict=False)
        found += [
            end for value, by in around if value is not None and by is not None for end in (value - by, value + by)
        ]
    return [*found, *(one.value for one in plot.thresholds), *(y for _, y in plot.curve)]


def _drawing(plot: Plot, plane: _Plane) -> Markup:
    parts = [
        *_axes(plot, plane),
        *(_band(plot.x, series, plane) for series in plot.series if series.spread),
        *_thresholds(plot, plane),
        *_marks(plot.marks, plane),
        *(_shape(plot.x, series, plane) for series in plot.series),
    ]
    if plot.curve:
        places = [f"{plane.x(x)},{plane.y(y)}" for x, y in plot.curve if plane.has(y)]
        parts.append(Markup('<path class="curve fit" d="M{}"/>').format("L".join(places)))
    return Markup("").join(parts)


def _axes(plot: Plot, plane: _Plane) -> Iterable[Markup]:
    for mark in plane.up.marks():
        y = plane.y(mark)
        yield Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(_LEFT, y, _RIGHT, y)
        yield _text(_LEFT - 6, y + 4, "end", short(mark))
    is_whole = all(float(x).is_integer() for x in plot.x) and not plot.curve
    free_from = 0.0
    for mark in plane.across.marks():
        text, x = short(mark), plane.x(mark)
        half = _LETTER * len(text) / 2
        if x - half >= free_from and (not is_whole or mark.is_integer()):
            yield _text(x, _BOTTOM + 15, "middle", text)
            free_from = x + half + _LETTER
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 32, "middle", plot.x_name)


def _text(x: float, y: float, anchor: str, text: str, kind: str = "") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _shape(x: Sequence[float], series: Series, plane: _Plane) -> Markup:
    """A line that is broken where a value was not finite, and goes on over rows without a value; or dots."""
    given = [(at, value) for at, value in zip(x, series.values, strict=True) if value is not None]
    places = [(plane.x(at), plane.y(value)) if plane.has(value) else None for at, value in given]
    dot = Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>')
    if series.is_dotted:
        return Markup("").join(dot.format(series.colour, *place, 2.4) for place in places if place)
    pieces = [list(group) for is_there, group in groupby(places, key=lambda place: place is not None) if is_there]
    shapes = [
        dot.format(series.colour, *piece[0], 2.6)  # a line of one point cannot be seen
        if len(piece) == 1 and piece[0]
        else Markup('<path class="curve {}" d="M{}"/>').format(
            series.colour, "L".join(f"{place[0]},{place[1]}" for place in piece if place)
        )
        for piece in pieces
    ]
    return Markup("").join(shapes)


def _band(x: Sequence[float], series: Series, plane: _Plane) -> Markup:
    """One spread up and down."""
    rows = [
        (plane.x(at), value, around)
        for at, value, around in zip(x, series.values, series.spread or (), strict=True)
        if value is not None and around is not None and plane.has(value - around) and plane.has(value + around)
    ]
    upper = [f"{at},{plane.y(value + around)}" for at, value, around in rows]
    lower = [f"{at},{plane.y(value - around)}" for at, value, around in reversed(rows)]
    if not rows:
        return Markup()
    return Markup('<path class="band {}" d="M{}Z"/>').format(series.colour, "L".join(upper + lower))


def _thresholds(plot: Plot, plane: _Plane) -> Iterable[Markup]:
    for one in plot.thresholds:
        y = plane.y(one.value)
        yield Markup('<line class="threshold {}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
            one.kind, _LEFT, y, _RIGHT, y
        )
        yield _text(_LEFT + 4, y - 4, "start", f"{one.name} {short(one.value)}", f"threshold {one.kind}")


def _marks(marks: Sequence[Mark], plane: _Plane) -> Iterable[Markup]:
    """One line an event; those that would touch each other share one, in the colour of the worst."""
    groups: list[list[Mark]] = []
    within = [mark for mark in marks if plane.across.low <= mark.x <= plane.across.high]
    for mark in sorted(within, key=lambda mark: mark.x):
        if groups and plane.x(mark.x) - plane.x(groups[-1][0].x) < _MARK_WIDTH:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        x = plane.x(group[0].x)
        worst = next(level for level in _WORST_FIRST if any(mark.level == level for mark in group))
        yield Markup(
            '<g class="event {}"><title>{}</title><line x1="{}" y1="{}" x2="{}" y2="{}"/>'
            '<path d="M{},{}l4,-7l-8,0z"/></g>'
        ).format(worst, "\n".join(mark.title for mark in group), x, _TOP, x, _BOTTOM, x, _TOP + 1)


def _legend(plot: Plot) -> Markup:
    entries = [Markup('<b class="{}">{}</b>').format(series.colour, series.name) for series in plot.series]
    if plot.curve:
        entries.append(Markup('<b class="fit">{}</b>').format(plot.curve_name))
    return Markup('<p class="key small">{}</p>').format(Markup("").join(entries)) if len(entries) > 1 else Markup()


def _caption(plot: Plot) -> Markup:
    bad = sum(_bad(series.values) for series in plot.series)
    gone = f" {bad} value{'s' if bad > 1 else ''} not finite: the line is broken there." if bad else ""
    return Markup("<figcaption>{}{}</figcaption>").format(plot.note, gone)


def _bad(values: Column) -> int:
    return sum(value is not None and not isfinite(value) for value in values)


def _summary(plot: Plot) -> str:
    """What a reader who cannot see the chart is told: both ends and both extremes of each line."""
    told = [
        f"{series.name}: first {short(finite[0])}, last {short(finite[-1])}, "
        f"lowest {short(min(finite))}, highest {short(max(finite))}"
        for series in plot.series
        if (finite := [value for value in series.values if value is not None and isfinite(value)])
    ]
    return f"{plot.title}. {'; '.join(told) or 'no values'}."


def _hover(plot: Plot, plane: _Plane) -> dict[str, Any]:
    """Places and texts of every row, for the script."""
    return {
        "x": [plane.x(x) for x in plot.x],
        "at": [f"{plot.x_name} {short(x)}" for x in plot.x],
        "lines": [
            {"name": series.name, "values": [None if value is None else short(value) for value in series.values]}
            for series in plot.series
        ],
    }
