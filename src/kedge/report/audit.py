"""The audit of data files as one page that opens anywhere: no script, font or picture from outside. All is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import TYPE_CHECKING

from markupsafe import Markup

from kedge.report.charts import svg
from kedge.report.charts.axes import Axis
from kedge.report.charts.plot import Bar, Bars, Colour, Plot
from kedge.report.chat import has_marks, named_turns
from kedge.report.pages import conversation, render_page

if TYPE_CHECKING:
    from kedge.data.auditing import Audit, FileAudit
    from kedge.data.auditing.result import Histogram, LongerWins, Offender

_COLOURS: Mapping[str, Colour] = {"prompt": "third", "rejected": "second", "disliked": "second"}

_PARTS = ("prompt", "chosen", "rejected", "answer", "liked", "disliked")
"""The names of the parts of an excerpt."""
_ABOUT_MARKS = ("tokens.", "template.")


def render_audit(audit: Audit, *, reasons: Mapping[str, str]) -> str:
    """One page: verdict, findings with their offenders, then the numbers of each file.

    `reasons` say, by the code of a finding, why it matters.
    """
    return render_page(
        "kedge.report",
        "audit.html.j2",
        audit=audit,
        objections=[finding for finding in audit.findings if finding.level != "ok"],
        passed=[finding for finding in audit.findings if finding.level == "ok"],
        counts={
            level: sum(finding.level == level for finding in audit.findings)
            for level in ("fatal", "warning", "info", "ok")
        },
        reasons=reasons,
        figures=_figures,
        longer_wins=_longer_wins,
        excerpt=_excerpt,
    )


def _excerpt(offender: Offender) -> Markup:
    """An item as it is in its file, or as turns where its text holds marks of a chat template and the finding is not
    about these."""
    if has_marks(offender.text) and not offender.code.startswith(_ABOUT_MARKS):
        return conversation(named_turns(offender.text, _PARTS))
    return Markup("<pre>{}</pre>").format(offender.text)


def _figures(file: FileAudit) -> list[Markup]:
    histograms = [histogram for histogram in file.histograms if any(histogram.counts)]
    return [svg.figure(length_plot(histogram), svg.SMALL) for histogram in histograms]


def _longer_wins(wins: LongerWins) -> Markup:
    return svg.share_strip(wins.share, wins.low, wins.high, label="share of longer winners with its interval")


def length_plot(histogram: Histogram) -> Plot:
    """Bars on a logarithmic axis; the empty texts, which have no logarithm, stand at the left end."""
    powers = range(int(log10(max(1, histogram.edges[-1]))) + 1)
    bins = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    return Plot(
        title=f"{histogram.side}, characters",
        note="",
        x_name="",
        bars=(
            Bars(
                name=histogram.side,
                colour=_COLOURS.get(histogram.side, "first"),
                bars=tuple(
                    Bar(low=low, high=high, height=count, title=f"{low:,} to {high - 1:,} characters: {count:,}")
                    for low, high, count in bins
                    if count
                ),
            ),
        ),
        across=Axis(
            low=0.0,
            high=histogram.edges[-1],
            scale="log1p",
            labels=[(10.0**power, _short_power(10**power)) for power in powers],
        ),
        up=Axis(low=0.0, high=max(histogram.counts), labels=[(0.0, "")]),
    )


def _short_power(number: int) -> str:
    """
    >>> _short_power(100), _short_power(1000), _short_power(1000000)
    ('100', '1k', '1M')
    """
    return f"{number // 10**6}M" if number >= 10**6 else f"{number // 1000}k" if number >= 1000 else str(number)
