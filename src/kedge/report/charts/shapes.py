"""The parts of a chart as SVG elements, each drawn on a plane. Everything that comes from data is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from markupsafe import Markup, escape

from kedge.core.findings import Level
from kedge.report.charts.axes import Plane
from kedge.report.charts.plot import Bars, Colour, Curve, Mark, Place, Point, Series, Threshold
from kedge.report.words import short

_LETTER = 6.2
"""Width of a digit in labels."""
_WIDE_LETTER = 7.0
"""Width of a letter in labels of points, on a narrow screen."""
_LONGEST_LABEL = 24
_MARK_WIDTH = 7.0
"""Events nearer to each other than this are one mark."""
_MOST_TITLES = 5
"""Events that one mark names; the list of events has them all."""
_WORST_FIRST: tuple[Level, ...] = ("fatal", "warning", "info", "ok")
_DOT = Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>')


def axes(plane: Plane, x_name: str) -> Iterable[Markup]:
    """A grid line and a text a tick; texts below the chart that would run into the one before are left out."""
    frame = plane.frame
    for value, text in plane.up.ticks():
        y = plane.y(value)
        yield _line("grid", frame.left, y, frame.right, y)
        if text:
            yield _text(frame.left - 6, y + 4, "end", text)
    free_from = 0.0
    for value, text in plane.across.ticks():
        x, half = plane.x(value), _LETTER * len(text) / 2
        if x - half >= free_from:
            yield _text(x, frame.bottom + 17, "middle", text)
            free_from = x + half + _LETTER
    if x_name:
        yield _text((frame.left + frame.right) / 2, frame.bottom + 34, "middle", x_name)


def line(x: Sequence[float], series: Series, plane: Plane) -> Markup:
    """A line that is broken where a value was not finite, and goes on over rows without a value; or dots."""
    given = [(at, value) for at, value in zip(x, series.values, strict=True) if value is not None]
    places = [(plane.x(at), plane.y(value)) if plane.has(value) else None for at, value in given]
    if series.is_dotted:
        return Markup("").join(_DOT.format(series.colour, *place, 2.4) for place in places if place)
    pieces = [list(group) for is_there, group in groupby(places, key=lambda place: place is not None) if is_there]
    kind = f"curve {series.colour}{' faint' if series.is_faint else ''}{' fit' if series.is_dashed else ''}"
    shapes = [
        _DOT.format(series.colour, *piece[0], 2.6)  # a line of one point cannot be seen
        if len(piece) == 1 and piece[0]
        else _path(kind, [place for place in piece if place])
        for piece in pieces
    ]
    return Markup("").join(shapes)


def band(x: Sequence[float], series: Series, plane: Plane) -> Markup:
    """One spread up and down."""
    rows = [
        (plane.x(at), value, around)
        for at, value, around in zip(x, series.values, series.spread or (), strict=True)
        if value is not None and around is not None and plane.has(value - around) and plane.has(value + around)
    ]
    upper = [(at, plane.y(value + around)) for at, value, around in rows]
    lower = [(at, plane.y(value - around)) for at, value, around in reversed(rows)]
    return _path(f"band {series.colour}", upper + lower, end="Z") if rows else Markup()


def curve(shown: Curve, plane: Plane) -> Markup:
    return _path(f"curve fit {shown.colour}", [(plane.x(x), plane.y(y)) for x, y in shown.places if plane.has(y)])


def points(shown: Sequence[Point], plane: Plane) -> Markup:
    """Intervals below, dots above, labels beside them."""
    colours: dict[Colour, None] = {at.colour: None for at in shown}
    groups = [_points_of([at for at in shown if at.colour == colour], colour, plane) for colour in colours]
    return Markup("").join([*groups, *_labels(shown, plane)])


def _points_of(shown: Sequence[Point], colour: Colour, plane: Plane) -> Markup:
    intervals = [_line("interval", plane.x(at.x), plane.y(at.low), plane.x(at.x), plane.y(at.high)) for at in shown]
    intervals += [
        _line("interval", plane.x(at.left), plane.y(at.y), plane.x(at.right), plane.y(at.y))
        for at in shown
        if at.left is not None and at.right is not None
    ]
    dots = [
        Markup('<circle cx="{}" cy="{}" r="4"><title>{}</title></circle>').format(
            plane.x(at.x), plane.y(at.y), at.title
        )
        for at in shown
    ]
    return Markup('<g class="{}">{}</g>').format(colour, Markup("").join([*intervals, *dots]))


def _labels(shown: Sequence[Point], plane: Plane) -> Iterable[Markup]:
    """Each on the side with more room; above or below its dot, where no other one stands."""
    taken: list[tuple[float, float, float]] = []
    for at in shown:
        if at.label:
            text = at.label if len(at.label) <= _LONGEST_LABEL else f"{at.label[: _LONGEST_LABEL - 1]}…"
            x, middle, width = plane.x(at.x), plane.y(at.y), _WIDE_LETTER * len(text)
            is_right = x > (plane.frame.left + plane.frame.right) / 2
            start = x - 6 - width if is_right else x + 6
            near = [top for left, right, top in taken if left < start + width and start < right]
            places = (middle + offset for step in range(len(taken) + 1) for offset in (-6 - 13 * step, 15 + 13 * step))
            y = next(place for place in places if all(abs(place - top) >= 13 for top in near))
            taken.append((start, start + width, y))
            yield _text(x - 6 if is_right else x + 6, round(y, 1), "end" if is_right else "start", text, "label")


def histogram(shown: Bars, plane: Plane, *, is_overlaid: bool) -> Markup:
    """Bars side by side, a little apart where nothing shows through them."""
    gap = 0.0 if is_overlaid else 1.0
    rects = [
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            plane.x(bar.low),
            plane.y(bar.height),
            max(1.0, round(plane.x(bar.high) - plane.x(bar.low) - gap, 1)),
            round((plane.frame.bottom if bar.base is None else plane.y(bar.base)) - plane.y(bar.height), 1),
            bar.title,
        )
        for bar in shown.bars
    ]
    kind = f"bars {shown.colour}{' overlaid' if is_overlaid else ''}"
    return Markup('<g class="{}">{}</g>').format(kind, Markup("").join(rects))


def guide(ends: tuple[Place, Place], plane: Plane) -> Markup:
    (x1, y1), (x2, y2) = ends
    return _line("guide", plane.x(x1), plane.y(y1), plane.x(x2), plane.y(y2))


def threshold(shown: Threshold, plane: Plane) -> Markup:
    y = plane.y(shown.value)
    name = f"{shown.name} {short(shown.value)}"
    level = _line(f"threshold {shown.kind}", plane.frame.left, y, plane.frame.right, y)
    return level + _text(plane.frame.left + 4, y - 4, "start", name, f"threshold {shown.kind}")


def events(marks: Sequence[Mark], plane: Plane) -> Iterable[Markup]:
    """One line an event; those that would touch each other share one, in the colour of the worst."""
    groups: list[list[Mark]] = []
    within = [mark for mark in marks if plane.across.low <= mark.x <= plane.across.high]
    for mark in sorted(within, key=lambda mark: mark.x):
        if groups and plane.x(mark.x) - plane.x(groups[-1][0].x) < _MARK_WIDTH:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups:
        x, top = plane.x(group[0].x), plane.frame.top
        worst = next(level for level in _WORST_FIRST if any(mark.level == level for mark in group))
        title = escape("\n".join([mark.title for mark in group[:_MOST_TITLES]] + _more(len(group) - _MOST_TITLES)))
        line = _line("", x, top, x, plane.frame.bottom)
        yield Markup(f'<g class="event {worst}"><title>{title}</title>{line}<path d="M{x},{top + 1}l4,-7l-8,0z"/></g>')


def _more(count: int) -> list[str]:
    return [f"and {count:,} more"] if count > 0 else []


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Escaped by hand, as a page of a long run has thousands and `Markup.format` takes ten times as long."""
    return Markup(f'<line class="{escape(kind)}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')


def _path(kind: str, places: Sequence[Place], end: str = "") -> Markup:
    return Markup('<path class="{}" d="M{}{}"/>').format(kind, "L".join(f"{x},{y}" for x, y in places), end)


def _text(x: float, y: float, anchor: str, text: str, kind: str = "") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)
