"""The report in a terminal: the verdict, the findings in words, the table of numbers; the page has the rest."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.core.findings import Level
from kedge.report.reward.numbers import numbers
from kedge.report.reward.result import RewardReport

_STYLES: dict[Level, str] = {"fatal": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}


def render_terminal(report: RewardReport) -> RenderableType:
    """What fits on one screen."""
    return Group(
        Text(report.verdict, style=_STYLES[report.level]),
        Text(),
        _numbers(report),
        Text(),
        _findings(report),
    )


def _numbers(report: RewardReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for row in numbers(report):
        table.add_row(Text(row.name), row.value, row.interval, Text(row.note))
    return table


def _findings(report: RewardReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    for finding in report.findings:
        text = Text(finding.message)
        text.append(f"  {finding.code}", style="dim")
        if finding.fix:
            text.append(f"\n{finding.fix}", style="dim")
        grid.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return grid
