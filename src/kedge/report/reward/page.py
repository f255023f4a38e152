"""The reward report as one page: its charts, and the values of its template. No script; everything is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.report import words
from kedge.report.charts import svg
from kedge.report.charts.axes import Axis
from kedge.report.charts.plot import Bar, Bars, Plot, Point
from kedge.report.chat import Turn, answer_text, named_turns
from kedge.report.pages import render_page
from kedge.report.reward.accuracy import Bin
from kedge.report.reward.calibration import Calibration
from kedge.report.reward.length_bias import LengthBin
from kedge.report.reward.numbers import numbers
from kedge.report.reward.result import Histogram, RewardReport
from kedge.report.reward.rules import RULES
from kedge.report.words import interval, number, percent, short, span

_TEXT_CHARACTERS = 1600
_AFTER_JUDGEMENT = re.compile(r"(?<=[.:]) ")
"""Where the judgement of a verdict ends and its reasons begin."""
_SHARES = Axis(low=0.0, high=1.0, labels=[(quarter / 4, f"{quarter * 25} %") for quarter in range(5)])


def render_html(report: RewardReport) -> str:
    """Verdict, findings, numbers, charts, then the worst errors with their text."""
    return render_page(
        "kedge.report.reward",
        "page.html.j2",
        report=report,
        verdict=_AFTER_JUDGEMENT.split(report.verdict, maxsplit=1),
        numbers=numbers(report),
        figures=[svg.figure(plot) for plot in _plots(report)],
        tables=_tables(report),
        rules=RULES,
        words=words,
        prompt_turns=_prompt_turns,
        answer=lambda text: words.cut(answer_text(text), _TEXT_CHARACTERS),
    )


def _prompt_turns(prompt: str) -> list[Turn]:
    return [Turn(role=turn.role, text=words.cut(turn.text, _TEXT_CHARACTERS)) for turn in named_turns(prompt)]


def _plots(report: RewardReport) -> list[Plot]:
    plots = [
        accuracy(
            report.by_length_gap,
            title="Accuracy by length gap",
            note="A model that rewards length is wrong on the left, where the rejected answer is longer.",
            x_name="tokens of chosen minus rejected",
        ),
        score_by_length(report.length.bins),
        reliability(report.calibration),
        histogram(report.histogram),
        accuracy(
            report.by_score_margin,
            title="Accuracy by score difference",
            note="It should rise: the model is then surest where it is right.",
            x_name="difference of the scores",
        ),
    ]
    if report.by_data_margin:
        plots.append(
            accuracy(
                report.by_data_margin,
                title="Accuracy by strength of the preference",
                note="It should rise: clear preferences are easier.",
                x_name="margin in the data",
            )
        )
    return plots


def _tables(report: RewardReport) -> list[tuple[str, Sequence[Bin]]]:
    tables: list[tuple[str, Sequence[Bin]]] = [
        ("length gap in tokens", report.by_length_gap),
        ("score difference", report.by_score_margin),
        ("margin in the data", report.by_data_margin),
    ]
    return [(name, bins) for name, bins in tables if bins]


def reliability(calibration: Calibration) -> Plot:
    """How often the model is right against how confident it is; on the diagonal the two are the same."""
    return Plot(
        title="Is it right as often as it is sure?",
        note="Below the dashed line the model is overconfident. Bars are 95 % intervals.",
        x_name="confidence",
        points=tuple(
            Point(
                x=bin.confidence,
                y=bin.observed.value,
                low=bin.observed.low,
                high=bin.observed.high,
                title=f"{percent(bin.confidence)} sure, right in {percent(bin.observed.value)} of {bin.observed.n:,} "
                f"({interval(bin.observed)})",
            )
            for bin in calibration.bins
        ),
        guides=(((0.5, 0.5), (1.0, 1.0)),),
        across=Axis(low=0.5, high=1.0, labels=[(tenth / 10, f"{tenth * 10} %") for tenth in range(5, 11)]),
        up=_SHARES,
    )


def histogram(scores: Histogram) -> Plot:
    """Scores of chosen and rejected answers over the same bins."""
    highest = max(*scores.chosen, *scores.rejected)
    return Plot(
        title="Scores of chosen and rejected answers",
        note="The further apart, the better the model tells them from each other.",
        x_name="score",
        bars=(
            Bars(name="chosen", colour="first", bars=_bars("chosen", scores.edges, scores.chosen)),
            Bars(name="rejected", colour="second", bars=_bars("rejected", scores.edges, scores.rejected)),
        ),
        across=Axis(low=scores.edges[0], high=scores.edges[-1]),
        up=Axis(low=0.0, high=highest, labels=[(0.0, "0"), (highest, f"{highest:,}")]),
    )


def _bars(side: str, edges: Sequence[float], counts: Sequence[int]) -> tuple[Bar, ...]:
    return tuple(
        Bar(low=low, high=high, height=count, title=f"{side}, {span(low, high)}: {count:,}")
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if count
    )


def accuracy(bins: Sequence[Bin], *, title: str, note: str, x_name: str) -> Plot:
    """One point a bin, side by side, whatever the distance of their numbers; the label is the median of the bin."""
    return Plot(
        title=title,
        note=note,
        x_name=x_name,
        points=tuple(
            Point(
                x=place + 0.5,
                y=bin.accuracy.value,
                low=bin.accuracy.low,
                high=bin.accuracy.high,
                title=f"{span(bin.low, bin.high)}: {percent(bin.accuracy.value)} of {bin.accuracy.n:,} "
                f"({interval(bin.accuracy)})",
            )
            for place, bin in enumerate(bins)
        ),
        guides=(((0.0, 0.5), (float(len(bins)), 0.5)),),
        across=_side_by_side([bin.median for bin in bins]),
        up=_SHARES,
    )


def score_by_length(bins: Sequence[LengthBin]) -> Plot:
    """Mean score against length, with one standard deviation of the scores up and down."""
    low = min(bin.score_mean - bin.score_std for bin in bins)
    high = max(bin.score_mean + bin.score_std for bin in bins)
    margin = 0.05 * (high - low) or 0.5
    return Plot(
        title="Score by length of the answer",
        note="A straight climb is a model that rewards length. Bars are one standard deviation.",
        x_name="tokens of the answer",
        points=tuple(
            Point(
                x=place + 0.5,
                y=bin.score_mean,
                low=bin.score_mean - bin.score_std,
                high=bin.score_mean + bin.score_std,
                title=f"{span(bin.low, bin.high)} tokens: mean score {number(bin.score_mean)} of {bin.n:,} answers",
            )
            for place, bin in enumerate(bins)
        ),
        across=_side_by_side([bin.median for bin in bins]),
        up=Axis(low=low - margin, high=high + margin),
    )


def _side_by_side(medians: Sequence[float]) -> Axis:
    """Bins at equal distances, each labelled with its median."""
    labels = [(place + 0.5, short(median)) for place, median in enumerate(medians)]
    return Axis(low=0.0, high=float(len(medians)), labels=labels)
