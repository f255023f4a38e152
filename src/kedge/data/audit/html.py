"""The audit as one HTML file that opens anywhere: no script, font or picture from outside. Everything is escaped."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kedge.core.pages import render_page
from kedge.data.audit.result import Audit, FileAudit, Histogram
from kedge.data.audit.rules import RULES

_WIDTH, _HEIGHT = 320.0, 72.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    x: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    side: str
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]


def render_html(audit: Audit) -> str:
    """One page: verdict, findings with their offenders, then the numbers of each file."""
    return render_page(
        "kedge.data.audit",
        "page.html.j2",
        audit=audit,
        told=[finding for finding in audit.findings if finding.level != "ok"],
        passed=[finding for finding in audit.findings if finding.level == "ok"],
        counts={
            level: sum(finding.level == level for finding in audit.findings)
            for level in ("fatal", "warning", "info", "ok")
        },
        rules=RULES,
        charts={number: _charts(file) for number, file in enumerate(audit.files)},
    )


def _charts(file: FileAudit) -> list[Chart]:
    return [chart(histogram) for histogram in file.histograms if any(histogram.counts)]


def chart(histogram: Histogram) -> Chart:
    """Bars on a logarithmic axis; the empty texts, which have no logarithm, stand at the left end."""
    highest = max(histogram.counts)
    pairs = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    bars = tuple(
        Bar(
            x=round(_place(low, histogram), 2),
            width=round(max(1.0, _place(high, histogram) - _place(low, histogram) - 1), 2),
            height=round(_HEIGHT * count / highest, 2),
            title=f"{low:,} to {high - 1:,} characters: {count:,}",
        )
        for low, high, count in pairs
        if count
    )
    tens = range(int(math.log10(max(1, histogram.edges[-1]))) + 1)
    ticks = tuple((round(_place(10**power, histogram), 2), _short(10**power)) for power in tens)
    return Chart(side=histogram.side, bars=bars, ticks=ticks)


def _place(length: int, histogram: Histogram) -> float:
    """Where a length lies on the axis: 1 + length, so that nothing has a place too."""
    return _WIDTH * math.log(1 + length) / math.log(1 + histogram.edges[-1])


def _short(number: int) -> str:
    """
    >>> _short(100), _short(1000), _short(1000000)
    ('100', '1k', '1M')
    """
    return f"{number // 10**6}M" if number >= 10**6 else f"{number // 1000}k" if number >= 1000 else str(number)
