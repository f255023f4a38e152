"""A comparison as one page that opens anywhere, without a network; its charts put score against KL, the frontier.

A line is the course of training in at most so many means of consecutive steps, in the order of their KL; a dot is an
evaluation. Everything that comes from data is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from kedge.core.metric_table import as_table
from kedge.report.charts import svg
from kedge.report.charts.plot import COLOURS, Colour, Curve, Plot, Series
from kedge.report.chat import Turn
from kedge.report.compare.entries import Entry
from kedge.report.compare.table import Row, rows_of, table_of
from kedge.report.pages import asset, render_page
from kedge.report.run.methods import what_was_run
from kedge.report.run.run_records import Record
from kedge.report.run.samples import answer_facts, shown_answer, shown_turns
from kedge.report.run.summary import what_happened

Source = Literal["reward", "gold"]
Point = tuple[float, float]
MOST_POINTS = 20
_MOST_SAMPLES = 6
_TITLES = {"reward": "Reward against KL", "gold": "Gold against KL"}
_NOTES = {
    "reward": "Up and to the left is better: more reward at less distance from the start. The reward is what was "
    "optimised, so it says how well that went and not how good the answers are.",
    "gold": "The same by a judge that nothing was trained on. Where a line turns down, its reward is being exploited.",
}


def render_comparison(entries: Sequence[Entry]) -> str:
    """The table, the charts and a summary of each run."""
    rows = rows_of(entries)
    return render_page(
        "kedge.report.compare",
        "page.html.j2",
        entries=entries,
        table=table_of(rows, entries, with_intervals=True),
        figures=[svg.figure(plot) for plot in plots(entries, rows)],
        summaries=[
            (entry, what_was_run(entry.stage.kind, entry.stage.settings), list(what_happened(entry.stage)))
            for entry in entries
        ],
        samples=shared_samples(entries),
        facts=answer_facts,
        answer=shown_answer,
        own_style=asset("kedge.report.run", "page.css") + asset("kedge.report.compare", "page.css"),
        script=asset("kedge.report.charts", "chart.js"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSample:
    """The last answers of several runs to one prompt."""

    turns: tuple[Turn, ...]
    answers: tuple[tuple[str, Record], ...]
    """Labels of runs, and their samples."""


def shared_samples(entries: Sequence[Entry]) -> list[SharedSample]:
    """Prompts that at least two runs were sampled on, those of most runs first."""
    last: dict[str, dict[str, int]] = {}
    """By prompt and run, where its last sample is."""
    for entry in entries:
        for place, sample in enumerate(entry.stage.samples):
            last.setdefault(str(sample.get("prompt", "")), {})[entry.label] = place
    shared = sorted((prompt for prompt in last if len(last[prompt]) > 1), key=lambda prompt: -len(last[prompt]))
    stages = {entry.label: entry.stage for entry in entries}
    return [
        SharedSample(
            turns=shown_turns(prompt),
            answers=tuple((label, stages[label].samples[place]) for label, place in last[prompt].items()),
        )
        for prompt in shared[:_MOST_SAMPLES]
    ]


def plots(entries: Sequence[Entry], rows: Sequence[Row]) -> list[Plot]:
    """One chart for each source that any run has numbers of; rewards of different kinds have one each."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in (row.trained_on, row.scored_by) if kind))
    rewards = [frontier(entries, rows, "reward", kind) for kind in (kinds if len(kinds) > 1 else [None])]
    return [plot for plot in (*rewards, frontier(entries, rows, "gold")) if plot]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    colour: Colour
    points: Sequence[Point]
    is_dotted: bool = False
    is_named: bool = True


def frontier(entries: Sequence[Entry], rows: Sequence[Row], source: Source, kind: str | None = None) -> Plot | None:
    """Score against KL of all runs, or by one kind of reward alone; None where no run has both."""
    lines: list[_Line] = []
    of_kind = [row for row in rows if kind in (None, row.scored_by)]
    by_label = {row.label: row for row in of_kind}
    for place, entry in enumerate(entries):
        colour = COLOURS[place % len(COLOURS)]
        trained = course(entry, source) if kind in (None, entry.trained_on) else []
        evaluated = _evaluated(by_label[entry.label], source) if entry.label in by_label else []
        name = f"{entry.label}, evaluated" if trained else entry.label
        lines.append(_Line(name=entry.label, colour=colour, points=trained))
        lines.append(_Line(name=name, colour=colour, points=evaluated, is_dotted=True, is_named=not trained))
    starts = [point for row in of_kind if row.method == "baseline" for point in _evaluated(row, source)]
    lines.append(_Line(name="start, evaluated", colour="ink", points=starts, is_dotted=True))
    lines = [line for line in lines if line.points]
    curve = _best_of_curve([entry for entry in entries if kind in (None, entry.trained_on)], source)
    if not lines and not curve:
        return None
    x = sorted({kl for line in lines for kl, _ in line.points})
    return Plot(
        title=f"{_TITLES[source]}, by {kind}" if kind else _TITLES[source],
        note=f"Lines are the course of training, dots are evaluations on held-out prompts. {_NOTES[source]}",
        x_name="KL from the start, nats a sequence",
        x=x,
        series=tuple(
            Series(
                name=line.name,
                colour=line.colour,
                values=[dict(line.points).get(kl) for kl in x],
                is_dotted=line.is_dotted,
                is_named=line.is_named,
            )
            for line in lines
        ),
        curve=curve,
    )


def course(entry: Entry, source: Source) -> list[Point]:
    """The course of training as (KL, score), by KL. A KL that sampling noise made negative stays, as measured."""
    table = as_table(entry.stage.metrics)
    kl, score = table.values("kl/mean"), table.values(f"{source}/mean")
    is_measured = np.isfinite(kl) & np.isfinite(score)
    points = list(zip(kl[is_measured].tolist(), score[is_measured].tolist(), strict=True))
    count = min(MOST_POINTS, len(points))
    parts = (points[len(points) * at // count : len(points) * (at + 1) // count] for at in range(count))
    return sorted((fmean(kl for kl, _ in part), fmean(score for _, score in part)) for part in parts)


def best_of_points(entry: Entry, source: Source) -> list[Point]:
    """The analytic curve of a best-of-N run: KL and score of the best of 1, 2, 4, … answers of its starting model."""
    curve = (entry.best_of or {}).get("curve", ())
    return [(point["kl"], point[source]) for point in curve if source in point]


def _best_of_curve(entries: Sequence[Entry], source: Source) -> Curve | None:
    """The longest of these curves, for runs from the same start have the same."""
    curves = [(best_of_points(entry, source), entry) for entry in entries]
    points, entry = max(curves, key=lambda curve: len(curve[0]), default=([], None))
    if not points or not entry or not entry.best_of:
        return None
    return Curve(name=f"best of 1 to {entry.best_of['n']}", places=tuple(points), colour="ink")


def _evaluated(row: Row, source: Source) -> list[Point]:
    kl, score = row.numbers.get("kl"), row.numbers.get(source)
    is_measured = kl and score and kl.source == score.source == "evaluation"
    return [(kl.value, score.value)] if kl and score and is_measured else []
