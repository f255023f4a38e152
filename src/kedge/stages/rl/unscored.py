"""Answers that a reward source gave no score to, as warnings of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kedge.rewards.failures import FailureCounter
from kedge.stages.shared.context import Context


def report_unscored(
    context: Context,
    counters: Iterable[FailureCounter],
    *,
    reported: Mapping[str, int] | None = None,
    code: str = "reward.unscored",
    step: int | None = None,
) -> dict[str, int]:
    """Warn of each source with more answers without a score than were `reported` before; gives their new numbers."""
    counts = dict(reported or {})
    for counter in counters:
        report = counter.report(top=3)
        if report.failed <= counts.get(report.source, 0):
            continue
        counts[report.source] = report.failed
        reasons = "; ".join(f"{reason} ({count}x)" for reason, count in report.reasons.items())
        message = f"{report.source}: {report.failed:,} of {report.rows:,} answers have no score so far: {reasons}"
        context.event("warning", code, message, step=step)
    return counts
