"""A plot as a figure with inline SVG that is complete without a script.

`chart.css` beside it has the colours; `chart.js` adds the values of the series under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from markupsafe import Markup

from kedge.report.charts import shapes
from kedge.report.charts.axes import Frame, Plane, tight_axis, value_axis
from kedge.report.charts.plot import Colour, Column, Plot, Series
from kedge.report.words import short

CARD = Frame(width=360.0, height=210.0, left=44.0, right=348.0, top=14.0, bottom=172.0)
"""A chart in a card of its own."""
SMALL = Frame(width=328.0, height=90.0, left=4.0, right=324.0, top=0.0, bottom=72.0)
"""One of several small ones side by side, without labels beside it."""
_STRIP_WIDTH, _STRIP_HEIGHT = 320.0, 14.0


def figure(plot: Plot, frame: Frame = CARD) -> Markup:
    """Title, legend, chart and caption."""
    plane = plane_of(plot, frame)
    scale = Markup(' <span class="soft">(log scale)</span>') if plane.up.scale == "log" else ""
    return Markup('<figure class="{kind}"><h3>{title}{scale}</h3>{legend}{drawing}{note}</figure>').format(
        kind="card chart" if frame is CARD else "chart",
        title=plot.title,
        scale=scale,
        legend=_legend(plot),
        drawing=_with_readings(plot, plane) if plot.series else _svg(plot, plane, drawing_of(plot, plane)),
        note=_caption(plot),
    )


def plane_of(plot: Plot, frame: Frame) -> Plane:
    """The axes of a plot in a frame, fitted to its values where it does not give them."""
    return Plane(
        frame=frame,
        across=plot.across or tight_axis([*plot.x, *(x for x, _ in _curve_places(plot))]),
        up=plot.up or value_axis(_heights(plot)),
    )


def share_strip(value: float, low: float, high: float, *, label: str) -> Markup:
    """A share with its interval on a line from 0 to 100 %, with a tick at one half."""
    middle = _STRIP_HEIGHT / 2
    return Markup(
        '<svg class="strip first" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        '<line x1="0" x2="{width}" y1="{middle}" y2="{middle}"/><line x1="{half}" x2="{half}" y1="0" y2="{height}"/>'
        '<rect x="{low}" y="4" width="{wide}" height="6" opacity=".45"/>'
        '<rect x="{value}" y="1" width="3" height="12"/></svg>'
    ).format(
        width=_STRIP_WIDTH,
        height=_STRIP_HEIGHT,
        label=label,
        middle=middle,
        half=_STRIP_WIDTH / 2,
        low=round(low * _STRIP_WIDTH, 2),
        wide=round((high - low) * _STRIP_WIDTH + 1, 2),
        value=round(value * _STRIP_WIDTH - 1.5, 2),
    )


def _with_readings(plot: Plot, plane: Plane) -> Markup:
    """The drawing with what `chart.js` needs: values in an attribute, a cursor and a line of text."""
    cursor = Markup('<line class="cursor" x1="0" y1="{}" x2="0" y2="{}" visibility="hidden"/>').format(
        plane.frame.top, plane.frame.bottom
    )
    values = json.dumps(_readings(plot, plane), separators=(",", ":"))
    attributes = Markup(' tabindex="0" data-hover="{}"').format(values)
    reading = Markup('<output class="reading" aria-live="polite"></output>')
    return _svg(plot, plane, drawing_of(plot, plane) + cursor, attributes) + reading


def _svg(plot: Plot, plane: Plane, drawing: Markup, attributes: str = "") -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"{}>{}</svg>').format(
        plane.frame.width, plane.frame.height, summary_of(plot), attributes, drawing
    )


def drawing_of(plot: Plot, plane: Plane) -> Markup:
    """From the back to the front."""
    parts = [
        *shapes.axes(plane, plot.x_name),
        *(shapes.guide(ends, plane) for ends in plot.guides),
        *(shapes.band(plot.x, series, plane) for series in plot.series if series.spread),
        *(shapes.threshold(threshold, plane) for threshold in plot.thresholds),
        *shapes.events(plot.marks, plane),
        *(shapes.histogram(bars, plane, is_overlaid=len(plot.bars) > 1 and not bars.is_stacked) for bars in plot.bars),
        *((shapes.points(plot.points, plane),) if plot.points else ()),
        *(shapes.line(plot.x, series, plane) for series in plot.series),
        *((shapes.curve(plot.curve, plane),) if plot.curve else ()),
    ]
    return Markup("").join(parts)


def _named(plot: Plot) -> list[Series]:
    """The lines that a reader is told of; faint ones only show what these were made of."""
    return [series for series in plot.series if not series.is_faint]


def _curve_places(plot: Plot) -> tuple[tuple[float, float], ...]:
    return plot.curve.places if plot.curve else ()


def _heights(plot: Plot) -> list[float]:
    """All numbers that the y axis must have room for."""
    heights = [value for series in plot.series for value in series.values if value is not None]
    for series in plot.series:
        around = zip(series.values, series.spread or (), strict=False)
        heights += [
            end for value, by in around if value is not None and by is not None for end in (value - by, value + by)
        ]
    heights += [threshold.value for threshold in plot.thresholds]
    heights += [y for _, y in _curve_places(plot)]
    heights += [end for point in plot.points for end in (point.low, point.high)]
    return heights + [bar.height for bars in plot.bars for bar in bars.bars]


def legend_of(plot: Plot) -> list[tuple[Colour, str, str]]:
    """Colour, sign and name of what a reader looks for: a line (no sign), dots, boxes, or a fit."""
    entries: list[tuple[Colour, str, str]] = [
        (series.colour, "dots" if series.is_dotted else "fit" if series.is_dashed else "", series.name)
        for series in _named(plot)
        if series.is_named
    ]
    for bars in plot.bars:
        entries.append((bars.colour, "boxes", bars.name))
    if plot.curve:
        entries.append((plot.curve.colour, "fit", plot.curve.name))
    return entries if len(entries) > 1 else []


def _legend(plot: Plot) -> Markup:
    entry = Markup('<b class="{}{}">{}</b>')
    entries = [entry.format(colour, f" {sign}" if sign else "", name) for colour, sign, name in legend_of(plot)]
    return Markup('<p class="key small">{}</p>').format(Markup("").join(entries)) if entries else Markup()


def _caption(plot: Plot) -> Markup:
    bad = sum(_num_not_finite(series.values) for series in plot.series)
    gone = f" {bad} value{'s' if bad > 1 else ''} not finite: the line is broken there." if bad else ""
    return Markup("<figcaption>{}{}</figcaption>").format(plot.note, gone) if plot.note or gone else Markup()


def _num_not_finite(values: Column) -> int:
    return sum(value is not None and not isfinite(value) for value in values)


def summary_of(plot: Plot) -> str:
    """The chart for a reader who cannot see it: ends and extremes of each line, every point, the highest bars, and all
    bars that stand on one another."""
    return f"{plot.title}. {'; '.join(_summaries(plot)) or 'no values'}."


def _summaries(plot: Plot) -> Iterator[str]:
    for series in plot.series:
        if finite := [value for value in series.values if value is not None and isfinite(value)]:
            yield (
                f"{series.name}: first {short(finite[0])}, last {short(finite[-1])}, "
                f"lowest {short(min(finite))}, highest {short(max(finite))}"
            )
    if plot.points:
        yield "; ".join(point.title for point in plot.points)
    for bars in plot.bars:
        if bars.is_stacked:
            yield "; ".join(bar.title for bar in bars.bars)
        elif bars.bars:
            yield f"highest of {bars.name}: {max(bars.bars, key=lambda bar: bar.height).title}"


def _readings(plot: Plot, plane: Plane) -> dict[str, Any]:
    """Places and texts of every row, for the script."""
    return {
        "x": [plane.x(x) for x in plot.x],
        "at": [f"{plot.x_name} {short(x)}" for x in plot.x],
        "lines": [
            {"name": series.name, "values": [None if value is None else short(value) for value in series.values]}
            for series in _named(plot)
        ],
    }
