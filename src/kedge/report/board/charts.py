"""The charts of a board: what alignment cost, and gold against proxy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kedge.report.board.records import Board, ProxyPoint, TaxPoint
from kedge.report.charts.axes import Axis, round_numbers
from kedge.report.charts.plot import COLOURS, Curve, Plot, Point
from kedge.report.words import listed, number, percent, short


def tax_plot(board: Board) -> Plot | None:
    """Win rate over the baseline against the worst difference among the exams to keep; a point a model."""
    if not board.tax:
        return None
    points = tuple(
        Point(
            x=100 * point.loss.value,
            y=100 * point.gain.value,
            low=100 * point.gain.low,
            high=100 * point.gain.high,
            left=100 * point.loss.low,
            right=100 * point.loss.high,
            label=point.label,
            title=_tax_title(point),
            colour=COLOURS[place % len(COLOURS)],
        )
        for place, point in enumerate(board.tax)
    )
    across = _axis([end for point in points for end in (point.left or 0.0, point.right or 0.0, 0.0)])
    up = _axis([end for point in points for end in (point.low, point.high, 50.0)])
    kept = listed([*board.kept[:8], *([f"{len(board.kept) - 8} more"] if len(board.kept) > 8 else [])])
    return Plot(
        title="Alignment tax",
        note=f"Up is preferred over {board.baseline} by {board.tax_source}; right has lost less. Across stands the "
        f"worst difference among {kept}, in points. Both have 95 % intervals; the worst of several looks worse than it "
        "is.",
        x_name=f"worst difference to {board.baseline}, points",
        points=points,
        guides=(((0.0, up.low), (0.0, up.high)), ((across.low, 50.0), (across.high, 50.0))),
        across=across,
        up=_labelled(up, "%"),
    )


def _tax_title(point: TaxPoint) -> str:
    gain, loss = point.gain, point.loss
    return (
        f"{point.label}: wins {percent(gain.value)} [{percent(gain.low)}, {percent(gain.high)}], worst {point.exam} "
        f"{number(100 * loss.value, 2)} [{number(100 * loss.low, 2)}, {number(100 * loss.high, 2)}] points"
    )


def proxy_plot(course: Sequence[ProxyPoint]) -> Plot:
    """Gold against proxy, the models joined in their order."""
    points = tuple(
        Point(
            x=point.proxy.value,
            y=point.gold.value,
            low=point.gold.low,
            high=point.gold.high,
            left=point.proxy.low,
            right=point.proxy.high,
            label=point.label,
            title=f"{point.label}: proxy {number(point.proxy.value)}, gold {number(point.gold.value)}",
        )
        for point in course
    )
    return Plot(
        title="Gold against proxy",
        note="Across the reward that was optimised, up the one that nothing was trained on, with 95 % intervals; the "
        "dashed line joins the models in the order of runs and stages. Where it goes right and down, the proxy is "
        "exploited.",
        x_name="proxy: mean reward",
        points=points,
        curve=Curve(name="order of models", places=tuple((point.x, point.y) for point in points), colour="ink"),
        across=_axis([end for point in points for end in (point.left or 0.0, point.right or 0.0)]),
        up=_axis([end for point in points for end in (point.low, point.high)]),
    )


def _axis(values: Sequence[float]) -> Axis:
    """With room on both sides."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    room = 0.08 * (high - low) or 0.5
    return Axis(low=low - room, high=high + room)


def _labelled(axis: Axis, unit: str) -> Axis:
    ticks = [(value, f"{short(value)} {unit}") for value in round_numbers(axis.low, axis.high)]
    return Axis(low=axis.low, high=axis.high, labels=ticks)
