"""Charts as marks on a plane, which the page turns into inline SVG; no plotting library.

A mark has a class for its colour and a title that shows under the pointer. y grows downwards, as in SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.report.charts.axes import ticks
from kedge.report.reward.bins import Bin
from kedge.report.reward.calibration import Calibration
from kedge.report.reward.length import LengthBin
from kedge.report.reward.result import Histogram
from kedge.report.reward.words import interval, number, percent, short, span

WIDTH, HEIGHT = 340.0, 220.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 322.0, 10.0, 178.0
_LETTER = 6.2
"""Width of a digit in labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    x: float
    y: float
    anchor: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    note: str
    lines: tuple[Line, ...]
    rects: tuple[Rect, ...] = ()
    dots: tuple[Dot, ...] = ()
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """From numbers to places, and the lines and labels of the axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (value - self.x_low) / (self.x_high - self.x_low), 2)

    def y(self, value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - self.y_low) / (self.y_high - self.y_low), 2)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> Line:
        return Line(x1=self.x(x1), y1=self.y(y1), x2=self.x(x2), y2=self.y(y2), kind=kind)

    def level(self, y: float, kind: str) -> Line:
        return self.line(self.x_low, y, self.x_high, y, kind)

    def x_labels(self, marks: Sequence[tuple[float, str]], name: str) -> tuple[Label, ...]:
        below = [Label(x=self.x(at), y=_BOTTOM + 15, anchor="middle", text=text) for at, text in marks]
        return (*_apart(below), Label(x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 34, anchor="middle", text=name))

    def y_labels(self, marks: Sequence[tuple[float, str]]) -> tuple[Label, ...]:
        return tuple(Label(x=_LEFT - 6, y=self.y(at) + 4, anchor="end", text=text) for at, text in marks)


def _apart(labels: Sequence[Label]) -> list[Label]:
    """Those that do not run into the one before them, from left to right."""
    kept: list[Label] = []
    for label in labels:
        if not kept or label.x - kept[-1].x > _LETTER * (len(label.text) + len(kept[-1].text) + 1) / 2:
            kept.append(label)
    return kept


_SHARES = tuple((share / 4, f"{share * 25} %") for share in range(5))


def reliability(of: Calibration) -> Chart:
    """How often the model is right against how sure it is; on the diagonal the two are the same."""
    plane = _Plane(x_low=0.5, x_high=1.0, y_low=0.0, y_high=1.0)
    return Chart(
        title="Is it right as often as it is sure?",
        note="Below the dashed line the model is overconfident. Bars are 95 % intervals.",
        lines=(
            *(plane.level(share, "grid") for share, _ in _SHARES),
            plane.line(0.5, 0.5, 1.0, 1.0, "ideal"),
            *(
                plane.line(bin.confidence, bin.observed.low, bin.confidence, bin.observed.high, "bar")
                for bin in of.bins
            ),
        ),
        dots=tuple(
            Dot(
                x=plane.x(bin.confidence),
                y=plane.y(bin.observed.value),
                title=f"{percent(bin.confidence)} sure, right in {percent(bin.observed.value)} of {bin.observed.n:,} "
                f"({interval(bin.observed)})",
            )
            for bin in of.bins
        ),
        labels=(
            *plane.x_labels([(tenth / 10, f"{tenth * 10} %") for tenth in range(5, 11)], "confidence"),
            *plane.y_labels(_SHARES),
        ),
    )


def histogram(of: Histogram) -> Chart:
    """Both sides over the same bins, one over the other."""
    highest = max(*of.chosen, *of.rejected)
    plane = _Plane(x_low=of.edges[0], x_high=of.edges[-1], y_low=0.0, y_high=float(highest))
    sides = (("chosen", of.chosen), ("rejected", of.rejected))
    return Chart(
        title="Scores of chosen and rejected answers",
        note="The further apart, the better the model tells them from each other.",
        lines=(plane.level(0.0, "axis"),),
        rects=tuple(
            Rect(
                x=plane.x(low),
                y=plane.y(count),
                width=round(plane.x(high) - plane.x(low), 2),
                height=round(_BOTTOM - plane.y(count), 2),
                kind=side,
                title=f"{side}, {span(low, high)}: {count:,}",
            )
            for side, counts in sides
            for low, high, count in zip(of.edges, of.edges[1:], counts, strict=False)
            if count
        ),
        labels=(
            *plane.x_labels([(at, short(at)) for at in ticks(of.edges[0], of.edges[-1])], "score"),
            *plane.y_labels([(0.0, "0"), (highest, f"{highest:,}")]),
        ),
    )


def accuracy(bins: Sequence[Bin], *, title: str, note: str, axis: str) -> Chart:
    """One dot a bin, side by side, whatever the distance of their numbers; the label is the median of the bin."""
    plane = _Plane(x_low=0.0, x_high=float(len(bins)), y_low=0.0, y_high=1.0)
    return Chart(
        title=title,
        note=note,
        lines=(
            *(plane.level(share, "ideal" if share == 0.5 else "grid") for share, _ in _SHARES),
            *(
                plane.line(at + 0.5, bin.accuracy.low, at + 0.5, bin.accuracy.high, "bar")
                for at, bin in enumerate(bins)
            ),
        ),
        dots=tuple(
            Dot(
                x=plane.x(at + 0.5),
                y=plane.y(bin.accuracy.value),
                title=f"{span(bin.low, bin.high)}: {percent(bin.accuracy.value)} of {bin.accuracy.n:,} "
                f"({interval(bin.accuracy)})",
            )
            for at, bin in enumerate(bins)
        ),
        labels=(
            *plane.x_labels([(at + 0.5, short(bin.median)) for at, bin in enumerate(bins)], axis),
            *plane.y_labels(_SHARES),
        ),
    )


def score_by_length(bins: Sequence[LengthBin]) -> Chart:
    """Mean score against length, with one standard deviation of the scores up and down."""
    low = min(bin.score_mean - bin.score_std for bin in bins)
    high = max(bin.score_mean + bin.score_std for bin in bins)
    margin = 0.05 * (high - low) or 0.5
    plane = _Plane(x_low=0.0, x_high=float(len(bins)), y_low=low - margin, y_high=high + margin)
    return Chart(
        title="Score by length of the answer",
        note="A straight climb is a model that rewards length. Bars are one standard deviation.",
        lines=(
            *(plane.level(at, "grid") for at in ticks(plane.y_low, plane.y_high)),
            *(
                plane.line(at + 0.5, bin.score_mean - bin.score_std, at + 0.5, bin.score_mean + bin.score_std, "bar")
                for at, bin in enumerate(bins)
            ),
        ),
        dots=tuple(
            Dot(
                x=plane.x(at + 0.5),
                y=plane.y(bin.score_mean),
                title=f"{span(bin.low, bin.high)} tokens: mean score {number(bin.score_mean)} of {bin.n:,} answers",
            )
            for at, bin in enumerate(bins)
        ),
        labels=(
            *plane.x_labels([(at + 0.5, short(bin.median)) for at, bin in enumerate(bins)], "tokens of the answer"),
            *plane.y_labels([(at, short(at)) for at in ticks(plane.y_low, plane.y_high)]),
        ),
    )
