"""The table of numbers of a reward report, and the report in a terminal: verdict, findings and that table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kedge.core.findings import Level
from kedge.report.reward.accuracy import Share
from kedge.report.reward.length_bias import Contest
from kedge.report.reward.result import RewardReport
from kedge.report.words import interval, number, percent

_STYLES: dict[Level, str] = {"fatal": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: str
    interval: str = ""
    note: str = ""


def numbers(report: RewardReport) -> list[Row]:
    """The rows of the table, which the page and the terminal share."""
    return [*_accuracies(report), *_groups(report), *_lengths(report), *_calibration(report), *_members(report)]


def _share(name: str, share: Share, note: str = "") -> Row:
    counted = f"{share.n:,} pairs" + (f", {share.ties:,} ties" if share.ties else "")
    return Row(
        name=name,
        value=percent(share.value),
        interval=interval(share),
        note=f"{counted}; {note}" if note else counted,
    )


def _accuracies(report: RewardReport) -> list[Row]:
    both = f"pair by pair {interval(report.wilson)}, by {report.prompts:,} prompts {interval(report.bootstrap)}"
    rows = [_share("accuracy", report.accuracy, both)]
    if report.train_accuracy is not None:
        rows.append(Row(name="accuracy on training pairs", value=percent(report.train_accuracy)))
    return rows


def _groups(report: RewardReport) -> list[Row]:
    return [
        _share(f"accuracy, {field} {value}", share)
        for field, by_value in report.by_group.items()
        for value, share in by_value.items()
    ]


def _lengths(report: RewardReport) -> list[Row]:
    length = report.length
    rows: list[Row] = []
    if length.balanced:
        rows.append(
            Row(
                name="balanced accuracy",
                value=percent(length.balanced.value),
                interval=interval(length.balanced),
                note="mean of the next two; blind to length",
            )
        )
    contests: list[tuple[str, Contest | None]] = [
        ("accuracy, longer chosen", length.longer_chosen),
        ("accuracy, longer rejected", length.longer_rejected),
        ("accuracy, equal lengths", length.equal),
    ]
    rows += [
        _share(name, contest.model, f"“the longer wins”: {percent(contest.rule)}")
        for name, contest in contests
        if contest
    ]
    gain = length.gain_over_longer
    scores, differences = number(length.score_pearson, 2), number(length.difference_pearson, 2)
    return [
        *rows,
        _share("“the longer wins”", length.rule),
        Row(name="gain over “the longer wins”", value=percent(gain.value), interval=interval(gain), note="in points"),
        Row(
            name="score and length", value=number(length.score_spearman, 2), note=f"rank correlation; Pearson {scores}"
        ),
        Row(
            name="their differences in a pair",
            value=number(length.difference_spearman, 2),
            note=f"rank correlation; Pearson {differences}",
        ),
    ]


def _calibration(report: RewardReport) -> list[Row]:
    calibration = report.calibration
    at_best = number(calibration.log_loss_at_temperature)
    return [
        Row(name="calibration error", value=number(calibration.error), note="expected, in shares"),
        Row(name="log-loss", value=number(calibration.log_loss), note="a coin has 0.693"),
        Row(
            name="best temperature",
            value=number(calibration.temperature, 2),
            note="no finite one is best" if calibration.temperature is None else f"log-loss there {at_best}",
        ),
        Row(name="scores", value=number(report.score_mean, 2), note=f"mean; spread {number(report.score_std, 2)}"),
    ]


def _members(report: RewardReport) -> list[Row]:
    agreement = report.agreement
    if agreement is None:
        return []
    rows = [_share(f"accuracy of member {at}", member.accuracy) for at, member in enumerate(agreement.members)]
    rows.append(Row(name="agreement of two members", value=percent(agreement.agreement), note="mean; same decision"))
    rows.append(
        Row(
            name="disagreement",
            value=number(agreement.disagreement, 2),
            note="spread between members over that of scores",
        )
    )
    if agreement.unanimous:
        rows.append(_share("accuracy, members agree", agreement.unanimous))
    if agreement.divided:
        rows.append(_share("accuracy, members disagree", agreement.divided))
    return rows


def render_terminal(report: RewardReport) -> RenderableType:
    """The verdict, the numbers and the findings, on about one screen; the page has the rest."""
    return Group(
        Text(report.verdict, style=_STYLES[report.level]),
        Text(),
        _number_table(report),
        Text(),
        _findings(report),
    )


def _number_table(report: RewardReport) -> Table:
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
