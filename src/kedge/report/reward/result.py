"""Everything measured of a reward model on held-out pairs, as one frozen record that turns into JSON.

The same pairs, in any order, give the same numbers. The findings and the verdict on them are made in `verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kedge.core.errors import ConfigError
from kedge.core.findings import Finding, Level, has_fatal
from kedge.report.reward.accuracy import (
    Agreement,
    Bin,
    Interval,
    Share,
    agreement,
    bootstrap,
    by_data_margin,
    by_length_gap,
    by_score_margin,
    by_value,
    share,
    wilson,
)
from kedge.report.reward.calibration import Calibration, calibration
from kedge.report.reward.length_bias import LengthBias, length_bias
from kedge.report.reward.scored_pairs import Columns, Combine, ScoredPair, columns

_HISTOGRAM_BINS = 30
_WORST_ERRORS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Scores of both sides over the same edges: `chosen[i]` of them lie in [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstError:
    """A pair that the model gets wrong, with the combined scores of both answers."""

    chosen_score: float
    rejected_score: float
    pair: ScoredPair


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """Everything that is known about a reward model on held-out pairs."""

    pairs: int
    prompts: int
    members: int
    combine: Combine
    accuracy: Share
    """The headline; `accuracy` says which interval it has."""
    wilson: Interval
    """The interval as if every pair were on its own."""
    bootstrap: Interval
    """The interval from drawing whole prompts again."""
    score_mean: float
    score_std: float
    contrast: float
    """Root mean square of the score differences, over the larger of 1 and the mean size of a score."""
    by_data_margin: tuple[Bin, ...]
    without_margin: int
    """Pairs whose data give no strength of the preference; they are in no bin of the above."""
    by_score_margin: tuple[Bin, ...]
    by_length_gap: tuple[Bin, ...]
    length: LengthBias
    calibration: Calibration
    histogram: Histogram
    agreement: Agreement | None
    errors: int
    """Pairs whose rejected answer has the higher score."""
    worst_errors: tuple[WorstError, ...]
    train_accuracy: float | None
    facts: Mapping[str, Any]
    by_group: Mapping[str, Mapping[str, Share]]
    """The accuracy by field of the records, then by its value."""
    findings: tuple[Finding, ...] = ()
    verdict: str = ""
    """The first sentence to read."""

    @property
    def is_fit(self) -> bool:
        return not has_fatal(self.findings)

    @property
    def level(self) -> Level:
        """Of the verdict; notes do not count."""
        levels = {finding.level for finding in self.findings}
        return "fatal" if "fatal" in levels else "warning" if "warning" in levels else "ok"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, as long as those of `facts` are."""
        return {"is_fit": self.is_fit, **asdict(self)}


def measured(
    pairs: Sequence[ScoredPair],
    *,
    combine: Combine,
    uncertainty_coef: float,
    train_accuracy: float | None,
    facts: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] = {},
) -> RewardReport:
    """All numbers of the report, without findings and verdict; `verdict.reward_report` explains the parameters."""
    if train_accuracy is not None and not 0 <= train_accuracy <= 1:
        raise ConfigError(f"train_accuracy: found {train_accuracy}, expected a share between 0 and 1")
    data = columns(pairs, combine=combine, uncertainty_coef=uncertainty_coef)
    score_A = np.concatenate([data.chosen_B, data.rejected_B])
    return RewardReport(
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
        by_group={field: by_value(data, values) for field, values in groups.items()},
    )


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
