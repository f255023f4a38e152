"""The whole report from scored pairs. Pure: the same pairs, in any order, give the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kedge.core.errors import ConfigError
from kedge.report.reward.bins import by_data_margin, by_length_gap, by_score_margin
from kedge.report.reward.calibration import calibration
from kedge.report.reward.intervals import bootstrap, share, wilson
from kedge.report.reward.judging import judge, verdict
from kedge.report.reward.length import length_bias
from kedge.report.reward.members import agreement
from kedge.report.reward.records import Columns, Combine, ScoredPair, columns
from kedge.report.reward.result import Histogram, RewardReport, WorstError

_HISTOGRAM_BINS = 30
_WORST_ERRORS = 12


def reward_report(
    pairs: Sequence[ScoredPair],
    *,
    combine: Combine = "mean",
    uncertainty_coef: float = 0.5,
    train_accuracy: float | None = None,
    facts: Mapping[str, Any] = {},
) -> RewardReport:
    """Judge a reward model on held-out pairs.

    `combine` and `uncertainty_coef` (mean minus this times the variance) are those that the rewards will be used with;
    `train_accuracy` is the accuracy on training pairs, for comparison; `facts` are shown as they are.
    """
    if train_accuracy is not None and not 0 <= train_accuracy <= 1:
        raise ConfigError(f"train_accuracy: found {train_accuracy}, expected a share between 0 and 1")
    data = columns(pairs, combine=combine, uncertainty_coef=uncertainty_coef)
    score_A = np.concatenate([data.chosen_B, data.rejected_B])
    report = RewardReport(
        pairs=len(pairs),
        prompts=len(np.unique(data.prompt_B)),
        members=data.chosen_BK.shape[1],
        combine=combine,
        accuracy=share(data.correct_B, data.prompt_B),
        wilson=wilson(float(data.correct_B.sum()), len(pairs)),
        bootstrap=bootstrap(data.correct_B, data.prompt_B),
        score_mean=float(score_A.mean()),
        score_std=float(score_A.std()),
        contrast=float(np.sqrt((data.difference_B**2).mean()) / max(1.0, float(np.abs(score_A).mean()))),
        by_data_margin=by_data_margin(data),
        without_margin=int(np.isnan(data.margin_B).sum()),
        by_score_margin=by_score_margin(data),
        by_length_gap=by_length_gap(data),
        length=length_bias(data),
        calibration=calibration(data),
        histogram=_histogram(data),
        agreement=agreement(data),
        errors=int((data.difference_B < 0).sum()),
        worst_errors=_worst_errors(pairs, data),
        train_accuracy=train_accuracy,
        facts=dict(facts),
    )
    findings = judge(report)
    return replace(report, findings=findings, verdict=verdict(report, findings))


def _histogram(data: Columns) -> Histogram:
    score_A = np.concatenate([data.chosen_B, data.rejected_B])
    low, high = float(score_A.min()), float(score_A.max())
    size = max(1.0, abs(low), abs(high))
    # a constant has no range to cut
    margin = 0.5 * size if high - low < 1e-9 * size else 0.0
    edges = np.linspace(low - margin, high + margin, _HISTOGRAM_BINS + 1)
    chosen, rejected = np.histogram(data.chosen_B, edges)[0], np.histogram(data.rejected_B, edges)[0]
    return Histogram(edges=tuple(edges.tolist()), chosen=tuple(chosen.tolist()), rejected=tuple(rejected.tolist()))


def _worst_errors(pairs: Sequence[ScoredPair], data: Columns) -> tuple[WorstError, ...]:
    """The pairs that are wrong by the largest score difference; ties are not wrong."""
    wrong = [row for row in np.argsort(data.difference_B, kind="stable").tolist() if data.difference_B[row] < 0]
    return tuple(
        WorstError(chosen_score=float(data.chosen_B[row]), rejected_score=float(data.rejected_B[row]), pair=pairs[row])
        for row in wrong[:_WORST_ERRORS]
    )
