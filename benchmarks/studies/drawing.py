"""The kinds of figures that the studies draw: dots with intervals by category, and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import Estimate
from kedge.report.charts.axes import Axis
from kedge.report.charts.plot import COLOURS, Plot, Point, Series, Threshold
from kedge.report.words import number


def dots(
    title: str,
    categories: Sequence[str],
    groups: Mapping[str, Sequence[Estimate | None]],
    *,
    up: Axis | None = None,
    thresholds: tuple[Threshold, ...] = (),
) -> Plot:
    """For each category a dot with its interval of every group, side by side; the legend names the groups."""
    width = 0.6 / len(groups)
    at = {
        (category, group): category + width * (group - (len(groups) - 1) / 2)
        for category in range(len(categories))
        for group in range(len(groups))
    }
    x = sorted(at.values())
    shown: list[Point] = []
    series: list[Series] = []
    for group, (name, values) in enumerate(groups.items()):
        colour = COLOURS[group % len(COLOURS)]
        heights = {at[category, group]: value for category, value in enumerate(values) if value is not None}
        shown += [
            Point(x=place, y=e.value, low=e.low, high=e.high, title=f"{name}: {number(e.value)}", colour=colour)
            for place, e in heights.items()
        ]
        each = [heights[place].value if place in heights else None for place in x]
        series.append(Series(name=name, colour=colour, values=each, is_dotted=True))
    across = Axis(low=-0.5, high=len(categories) - 0.5, labels=list(enumerate(categories)))
    return Plot(
        title=title,
        note="",
        x_name="",
        x=x,
        series=tuple(series),
        points=tuple(shown),
        thresholds=thresholds,
        across=across,
        up=up,
    )


def lines(
    title: str,
    x_name: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    up: Axis | None = None,
    thresholds: tuple[Threshold, ...] = (),
    faint: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Plot:
    """A line a name through (x, y), each with places of its own. `faint` are lines behind those of the same name."""
    behind = {} if faint is None else faint
    x = sorted({at for places in (*curves.values(), *behind.values()) for at, _ in places})

    def line(name: str, places: Sequence[tuple[float, float]], *, is_faint: bool) -> Series:
        colour = COLOURS[list(curves).index(name) % len(COLOURS)]
        heights = dict(places)
        return Series(name=name, colour=colour, values=[heights.get(at) for at in x], is_faint=is_faint)

    series = [line(name, places, is_faint=True) for name, places in behind.items()]
    series += [line(name, places, is_faint=False) for name, places in curves.items()]
    return Plot(title=title, note="", x_name=x_name, x=x, series=tuple(series), thresholds=thresholds, up=up)
