"""The report as one page: no script, font or picture from outside. Everything is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kedge.core.pages import render_page
from kedge.report.reward import charts, words
from kedge.report.reward.bins import Bin
from kedge.report.reward.numbers import numbers
from kedge.report.reward.result import RewardReport
from kedge.report.reward.rules import RULES

_TEXT_CHARACTERS = 1600
_FIRST = re.compile(r"(?<=[.:]) ")
"""Where the judgement of a verdict ends and its reasons begin."""


def render_html(report: RewardReport) -> str:
    """Verdict, findings, numbers, charts, then the worst errors with their text."""
    return render_page(
        "kedge.report.reward",
        "page.html.j2",
        report=report,
        verdict=_FIRST.split(report.verdict, maxsplit=1),
        numbers=numbers(report),
        charts=_charts(report),
        tables=_tables(report),
        size=(charts.WIDTH, charts.HEIGHT),
        rules=RULES,
        words=words,
        cut=cut,
    )


def cut(text: str) -> str:
    """The beginning and the end of a long text, with how much was left out between them.

    >>> cut("a" * 1000 + "b" * 1000)[798:850]
    'aa\\n… 400 characters left out …\\nbbbbbbbbbbbbbbbbbbbbb'
    """
    left_out = len(text) - _TEXT_CHARACTERS
    if left_out <= 0:
        return text
    half = _TEXT_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"


def _charts(report: RewardReport) -> list[charts.Chart]:
    found = [
        charts.accuracy(
            report.by_length_gap,
            title="Accuracy by length gap",
            note="A model that rewards length is wrong on the left, where the rejected answer is longer.",
            axis="tokens of chosen minus rejected",
        ),
        charts.score_by_length(report.length.bins),
        charts.reliability(report.calibration),
        charts.histogram(report.histogram),
        charts.accuracy(
            report.by_score_margin,
            title="Accuracy by score difference",
            note="It should rise: the model is then surest where it is right.",
            axis="difference of the scores",
        ),
    ]
    if report.by_data_margin:
        found.append(
            charts.accuracy(
                report.by_data_margin,
                title="Accuracy by strength of the preference",
                note="It should rise: clear preferences are easier.",
                axis="margin in the data",
            )
        )
    return found


def _tables(report: RewardReport) -> list[tuple[str, Sequence[Bin]]]:
    found: list[tuple[str, Sequence[Bin]]] = [
        ("length gap in tokens", report.by_length_gap),
        ("score difference", report.by_score_margin),
        ("margin in the data", report.by_data_margin),
    ]
    return [(name, bins) for name, bins in found if bins]
