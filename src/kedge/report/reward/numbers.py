"""The table of numbers that the page and the terminal share."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.report.reward.intervals import Share
from kedge.report.reward.length import Contest
from kedge.report.reward.result import RewardReport
from kedge.report.reward.words import interval, number, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: str
    interval: str = ""
    note: str = ""


def numbers(report: RewardReport) -> list[Row]:
    return [*_accuracies(report), *_lengths(report), *_calibration(report), *_members(report)]


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
    found = report.calibration
    at = number(found.log_loss_at_temperature)
    return [
        Row(name="calibration error", value=number(found.error), note="expected, in shares"),
        Row(name="log-loss", value=number(found.log_loss), note="a coin has 0.693"),
        Row(
            name="best temperature",
            value=number(found.temperature, 2),
            note="no finite one is best" if found.temperature is None else f"log-loss there {at}",
        ),
        Row(name="scores", value=number(report.score_mean, 2), note=f"mean; spread {number(report.score_std, 2)}"),
    ]


def _members(report: RewardReport) -> list[Row]:
    found = report.agreement
    if found is None:
        return []
    rows = [_share(f"accuracy of member {at}", member.accuracy) for at, member in enumerate(found.members)]
    rows.append(Row(name="agreement of two members", value=percent(found.agreement), note="mean; same decision"))
    rows.append(
        Row(name="disagreement", value=number(found.disagreement, 2), note="spread between members over that of scores")
    )
    if found.unanimous:
        rows.append(_share("accuracy, members agree", found.unanimous))
    if found.divided:
        rows.append(_share("accuracy, members disagree", found.divided))
    return rows
