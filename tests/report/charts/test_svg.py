"""Charts as SVG: places worked out by hand, gaps where values are not finite, everything escaped."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from typing import Any

import pytest

from kedge.report.charts.axes import Axis, round_numbers, value_axis
from kedge.report.charts.plot import Bar, Bars, Curve, Mark, Plot, Point, Series, Threshold, over_steps
from kedge.report.charts.svg import SMALL, figure, share_strip

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
    drawn = re.findall(rf'<path class="{kind}" d="M([^"]*)"', page)
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in path.rstrip("Z").split("L"))] for path in drawn
    ]


def test_points_stand_where_their_numbers_say() -> None:
    (line,) = paths(figure(plot()), "curve first")
    high = 10.8  # the axis goes from 0 to 8 % above the largest value
    expected = [
        (LEFT, BOTTOM),
        (LEFT + (RIGHT - LEFT) / 2, BOTTOM - (BOTTOM - TOP) * 4 / high),
        (RIGHT, BOTTOM - (BOTTOM - TOP) * 10 / high),
    ]
    assert line == [(pytest.approx(x, abs=0.051), pytest.approx(y, abs=0.051)) for x, y in expected]


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
    assert axis == Axis(low=0.1, high=1000.0, scale="log")
    assert axis.share(10.0) == pytest.approx(0.5)
    assert [value for value, _ in axis.ticks()] == pytest.approx([0.1, 1.0, 10.0, 100.0, 1000.0])
    assert "(log scale)" in figure(
        plot(x=[0, 1, 2, 3], series=(Series(name="a", colour="first", values=[0.5, 1.0, 2.0, 900.0]),))
    )


def test_ticks_are_round_numbers_inside() -> None:
    assert round_numbers(0.0, 1000.0) == [0, 200, 400, 600, 800, 1000]
    assert round_numbers(-0.031, 0.012) == pytest.approx([-0.03, -0.02, -0.01, 0, 0.01])


def test_ticks_below_whole_steps_are_whole() -> None:
    page = figure(plot(x=[1, 2], series=(Series(name="a", colour="first", values=[1.0, 2.0]),)))
    assert re.findall(r'text-anchor="middle">([^<]*)<', page) == ["1", "2", "step"]


def test_points_have_their_interval_and_a_title_that_is_escaped() -> None:
    point = Point(x=5.0, y=0.5, low=0.25, high=1.0, title="<b> 5")
    shares = Axis(low=0.0, high=1.0, labels=[(0.0, "none"), (1.0, "all")])
    page = figure(
        Plot(title="t", note="", x_name="", points=(point,), across=Axis(low=0.0, high=10.0, labels=()), up=shares)
    )
    assert '<line class="interval" x1="196.0" y1="132.5" x2="196.0" y2="14.0"/>' in page
    assert '<circle cx="196.0" cy="93.0" r="4"><title>&lt;b&gt; 5</title></circle>' in page
    assert re.findall(r"<text[^>]*>([^<]*)<", page) == ["none", "all"]
    assert 'aria-label="t. &lt;b&gt; 5."' in page
    # without series there is nothing to read under the pointer
    assert not {word for word in ("data-hover", "tabindex", "cursor", "<output", "<figcaption") if word in page}


def test_bars_stand_on_one_another_and_are_all_told_to_who_cannot_see_them() -> None:
    lower = Bars(name="a", colour="first", bars=(Bar(low=0.0, high=5.0, base=0.0, height=1.0, title="a is 1"),))
    upper = Bars(name="b", colour="second", bars=(Bar(low=0.0, high=5.0, base=1.0, height=4.0, title="b is 3"),))
    across, up = Axis(low=0.0, high=10.0), Axis(low=0.0, high=4.0)
    page = figure(Plot(title="t", note="", x_name="", bars=(lower, upper), across=across, up=up), SMALL)
    assert '<rect x="4.0" y="54.0" width="159.0" height="18.0"><title>a is 1</title>' in page
    assert '<rect x="4.0" y="0.0" width="159.0" height="54.0"><title>b is 3</title>' in page
    assert "overlaid" not in page
    assert 'aria-label="t. a is 1; b is 3."' in page


def test_bars_of_one_histogram_stand_alone_and_two_show_through() -> None:
    bars = [Bars(name=name, colour="first", bars=(Bar(low=0.0, high=5.0, height=2.0, title=name),)) for name in "ab"]
    axes = {"across": Axis(low=0.0, high=10.0), "up": Axis(low=0.0, high=4.0)}
    alone = figure(Plot(title="t", note="", x_name="", bars=(bars[0],), **axes), SMALL)
    assert (
        '<g class="bars first"><rect x="4.0" y="36.0" width="159.0" height="36.0"><title>a</title></rect></g>' in alone
    )
    assert '<figure class="chart">' in alone
    assert 'class="key' not in alone
    both = figure(Plot(title="t", note="", x_name="", bars=tuple(bars), **axes))
    assert both.count('<g class="bars first overlaid">') == 2
    assert '<b class="first boxes">a</b><b class="first boxes">b</b>' in both


def test_the_legend_shows_a_line_a_dot_and_a_dashed_curve() -> None:
    series = (
        Series(name="trained", colour="fourth", values=[1.0, None, 3.0]),
        Series(name="evaluated", colour="fourth", values=[None, 2.0, None], is_dotted=True),
    )
    page = figure(plot(series=series, curve=Curve(name="fit", places=((0.0, 0.0), (20.0, 4.0)), colour="ink")))
    assert '<b class="fourth">trained</b><b class="fourth dots">evaluated</b><b class="ink fit">fit</b>' in page
    (line,) = paths(page, "curve fit ink")
    assert line[0] == (LEFT, BOTTOM)
    assert line[1][0] == RIGHT


def test_a_share_with_its_interval_lies_on_a_line_from_none_to_all() -> None:
    strip = share_strip(0.5, 0.25, 0.75, label="<wins>")
    assert '<rect x="80.0" y="4" width="161.0" height="6" opacity=".45"/><rect x="158.5"' in strip
    assert 'aria-label="&lt;wins&gt;"' in strip


def test_over_steps_takes_the_metrics_that_are_there() -> None:
    records = [{"step": 1, "a": 1.0, "s": 0.5}, {"step": 2, "b": 7.0}, {"step": 3, "a": 3.0, "b": 8.0}, {"step": 4}]
    found = over_steps(records, {"a": "A", "b": "B", "c": "C"}, title="t", note="", spread="s")
    assert found is not None
    assert list(found.x) == [1, 2, 3]
    assert [(series.name, list(series.values)) for series in found.series] == [
        ("A", [1.0, None, 3.0]),
        ("B", [None, 7.0, 8.0]),
    ]
    assert found.series[0].spread == [0.5, None, None]
    assert found.series[1].spread is None
    assert over_steps(records, {"c": "C"}, title="t", note="") is None


def test_labels_of_points_that_are_near_each_other_stand_apart() -> None:
    points = tuple(
        Point(x=6.0 + 0.1 * n, y=0.5, low=0.4, high=0.6, title="", left=4.0, right=6.0, label=f"<model {n}>")
        for n in range(3)
    )
    axis = Axis(low=0.0, high=10.0, labels=())
    page = figure(Plot(title="t", note="", x_name="", points=points, across=axis, up=Axis(low=0.0, high=1.0)))
    heights = re.findall(r'<text class="label" x="[\d.]+" y="([\d.]+)"[^>]*>&lt;model', page)
    assert len(set(heights)) == len(heights) == 3
    assert page.count('<line class="interval"') == 6
