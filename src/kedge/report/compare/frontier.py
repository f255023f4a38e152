"""What was reached over how far a policy went: score against KL, a line a run, a point an evaluation.

A line is the course of training in at most so many means of consecutive steps, drawn in the order of their KL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import fmean
from typing import Literal, cast

from kedge.report.charts.plot import Colour, Plot, Series
from kedge.report.compare.numbers import Row
from kedge.report.compare.records import Entry

Source = Literal["reward", "gold"]
Point = tuple[float, float]
MOST_POINTS = 20
COLOURS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""The first three are those of every chart; `page.css` beside this file has the others."""
_TITLES = {"reward": "Reward against KL", "gold": "Gold against KL"}
_NOTES = {
    "reward": "Up and to the left is better: more reward at less distance from the start. The reward is what was "
    "optimised, so it says how well that went and not how good the answers are.",
    "gold": "The same by a judge that nothing was trained on. Where a line turns down, its reward is being exploited.",
}


def plots(entries: Sequence[Entry], rows: Sequence[Row]) -> list[Plot]:
    """One chart a source that anybody has numbers of."""
    return [plot for source in ("reward", "gold") if (plot := frontier(entries, rows, source))]


def frontier(entries: Sequence[Entry], rows: Sequence[Row], source: Source) -> Plot | None:
    lines: list[tuple[str, str, bool, Sequence[Point]]] = []
    by_label = {row.label: row for row in rows}
    for entry, colour in zip(entries, _colours(), strict=False):
        trained, evaluated = course(entry, source), _evaluated(by_label[entry.label], source)
        lines.append((entry.label, colour, False, trained))
        lines.append((f"{entry.label}, evaluated" if trained else entry.label, colour, True, evaluated))
    starts = [point for row in rows if row.method == "baseline" for point in _evaluated(row, source)]
    lines.append(("start, evaluated", "start", True, starts))
    lines = [line for line in lines if line[3]]
    curve, name = _best_of(entries, source)
    if not lines and not curve:
        return None
    x = sorted({point[0] for *_, points in lines for point in points})
    return Plot(
        title=_TITLES[source],
        note=_NOTES[source],
        x_name="KL from the start, nats a sequence",
        x=x,
        series=tuple(
            Series(
                name=label,
                colour=cast(Colour, colour),
                values=[dict(points).get(at) for at in x],
                is_dotted=is_dotted,
            )
            for label, colour, is_dotted, points in lines
        ),
        curve=curve,
        curve_name=name,
    )


def course(entry: Entry, source: Source) -> list[Point]:
    """Where training went, (KL, score), by KL. One that sampling noise made negative stays: it is what was measured."""
    found = [
        (float(record["kl/mean"]), float(record[f"{source}/mean"]))
        for record in entry.stage.metrics
        if _is_number(record.get("kl/mean")) and _is_number(record.get(f"{source}/mean"))
    ]
    count = min(MOST_POINTS, len(found))
    parts = (found[len(found) * at // count : len(found) * (at + 1) // count] for at in range(count))
    return sorted((fmean(kl for kl, _ in part), fmean(score for _, score in part)) for part in parts)


def best_of_points(entry: Entry, source: Source) -> list[Point]:
    """The analytic curve of a best-of-N run: KL and score of the best of 1, 2, 4, … answers of its starting model."""
    curve = (entry.best_of or {}).get("curve", ())
    return [(point["kl"], point[source]) for point in curve if source in point]


def _best_of(entries: Sequence[Entry], source: Source) -> tuple[tuple[Point, ...], str]:
    """The longest of these curves, for runs from the same start have the same."""
    found = [(best_of_points(entry, source), entry) for entry in entries]
    points, entry = max(found, key=lambda one: len(one[0]), default=([], None))
    largest = entry.best_of["n"] if entry and entry.best_of else 0
    return tuple(points), f"best of 1 to {largest}" if points else ""


def _evaluated(row: Row, source: Source) -> list[Point]:
    kl, score = row.numbers.get("kl"), row.numbers.get(source)
    is_measured = kl and score and kl.source == score.source == "evaluation"
    return [(kl.value, score.value)] if kl and score and is_measured else []


def _colours() -> Iterator[str]:
    while True:
        yield from COLOURS


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)
