"""Charts as SVG: places worked out by hand, gaps where values are not finite, everything escaped."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from typing import Any

import pytest

from kedge.report.charts.axes import Axis, value_axis
from kedge.report.charts.plot import Mark, Plot, Series, Threshold, over_steps
from kedge.report.charts.svg import figure

LEFT, RIGHT, TOP, BOTTOM = 44.0, 348.0, 14.0, 172.0


def plot(**changes: Any) -> Plot:
    values: dict[str, Any] = {
        "title": "Reward",
        "note": "A note.",
        "x_name": "step",
        "x": [0, 10, 20],
        "series": (Series(name="mean", colour="first", values=[0.0, 4.0, 10.0]),),
    }
    return Plot(**{**values, **changes})


def paths(page: str, kind: str) -> list[list[tuple[float, float]]]:
    """The points of every path of a class."""
    found = re.findall(rf'<path class="{kind}" d="M([^"]*)"', page)
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in one.rstrip("Z").split("L"))] for one in found
    ]


def test_points_stand_where_their_numbers_say() -> None:
    (line,) = paths(figure(plot()), "curve first")
    high = 10.8  # the axis goes from 0 to 8 % above the largest value
    wanted = [
        (LEFT, BOTTOM),
        (LEFT + (RIGHT - LEFT) / 2, BOTTOM - (BOTTOM - TOP) * 4 / high),
        (RIGHT, BOTTOM - (BOTTOM - TOP) * 10 / high),
    ]
    assert line == [(pytest.approx(x, abs=0.051), pytest.approx(y, abs=0.051)) for x, y in wanted]


def test_a_line_breaks_at_what_is_not_finite_and_goes_on_over_what_is_absent() -> None:
    page = figure(
        plot(x=[0, 1, 2, 3, 4], series=(Series(name="a", colour="first", values=[1.0, 2.0, math.nan, 3.0, 1.5]),))
    )
    assert [len(line) for line in paths(page, "curve first")] == [2, 2]
    assert "1 value not finite: the line is broken there." in page
    page = figure(plot(series=(Series(name="a", colour="first", values=[1.0, None, 3.0]),)))
    assert [len(line) for line in paths(page, "curve first")] == [2]
    assert "not finite" not in page


def test_a_single_point_is_a_dot() -> None:
    page = figure(plot(x=[7], series=(Series(name="a", colour="second", values=[2.0]),)))
    assert page.count('<circle class="second"') == 1
    assert "<path" not in page


def test_the_band_lies_one_spread_around_its_line() -> None:
    series = Series(name="a", colour="first", values=[2.0, 4.0], spread=[1.0, 2.0])
    page = figure(plot(x=[0, 1], series=(series,)))
    (band,) = paths(page, "band first")
    (line,) = paths(page, "curve first")
    up, high = [y for _, y in band[:2]], 6 * 1.08  # from 0 to 8 % above 4 + 2
    assert up == [pytest.approx(BOTTOM - (BOTTOM - TOP) * top / high, abs=0.051) for top in (3, 6)]
    assert [(top + low) / 2 for (_, top), (_, low) in zip(band[:2], band[:1:-1], strict=True)] == [
        pytest.approx(y, abs=0.06) for _, y in line
    ]


def test_events_near_each_other_are_one_mark_of_the_worst_level() -> None:
    marks = (
        Mark(x=10, level="info", title="one"),
        Mark(x=10.1, level="fatal", title="two <b>"),
        Mark(x=3, level="warning", title="three"),
        Mark(x=99, level="fatal", title="outside"),
    )
    page = figure(plot(marks=marks))
    assert re.findall(r'<g class="event (\w+)"><title>([^<]*)</title>', page) == [
        ("warning", "three"),
        ("fatal", "one\ntwo &lt;b&gt;"),
    ]


def test_thresholds_are_drawn_and_make_room_for_themselves() -> None:
    page = figure(plot(thresholds=(Threshold(value=20.0, name="limit", kind="limit"),)))
    (y,) = re.findall(r'<line class="threshold limit" x1="44.0" y1="([\d.]+)"', page)
    assert float(y) == pytest.approx(BOTTOM - (BOTTOM - TOP) * 20 / 21.6, abs=0.051)
    assert "limit 20" in page


def test_what_comes_from_data_is_escaped_and_the_values_can_be_read_back() -> None:
    name = '"><script>alert(1)</script>'
    page = figure(plot(title=name, note=name, series=(Series(name=name, colour="first", values=[1.0, None, 2.5]),)))
    assert "<script>" not in page
    (text,) = re.findall(r'data-hover="([^"]*)"', page)
    hover = json.loads(unescape(text))
    assert hover["at"] == ["step 0", "step 10", "step 20"]
    assert hover["lines"] == [{"name": name, "values": ["1", None, "2.5"]}]


def test_the_label_tells_those_who_cannot_see() -> None:
    page = figure(plot(series=(Series(name="mean", colour="first", values=[3.0, 1.0, 2.0]),)))
    assert 'aria-label="Reward. mean: first 3, last 2, lowest 1, highest 3."' in page


def test_a_value_that_towers_makes_the_axis_logarithmic() -> None:
    axis = value_axis([0.5, 1.0, 2.0, 900.0])
    assert axis == Axis(low=0.1, high=1000.0, is_log=True)
    assert axis.share(10.0) == pytest.approx(0.5)
    assert axis.marks() == pytest.approx([0.1, 1.0, 10.0, 100.0, 1000.0])
    assert "(log scale)" in figure(
        plot(x=[0, 1, 2, 3], series=(Series(name="a", colour="first", values=[0.5, 1.0, 2.0, 900.0]),))
    )


def test_over_steps_takes_the_metrics_that_are_there() -> None:
    records = [{"step": 1, "a": 1.0, "s": 0.5}, {"step": 2, "b": 7.0}, {"step": 3, "a": 3.0, "b": 8.0}, {"step": 4}]
    found = over_steps(records, {"a": "A", "b": "B", "c": "C"}, title="t", note="", spread="s")
    assert found is not None
    assert list(found.x) == [1, 2, 3]
    assert [(one.name, list(one.values)) for one in found.series] == [("A", [1.0, None, 3.0]), ("B", [None, 7.0, 8.0])]
    assert found.series[0].spread == [0.5, None, None]
    assert found.series[1].spread is None
    assert over_steps(records, {"c": "C"}, title="t", note="") is None
