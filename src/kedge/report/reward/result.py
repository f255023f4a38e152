"""The report as one frozen record that turns into JSON. No judgement here: that is `rules` and `judging`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kedge.core.findings import Finding, Level, has_fatal
from kedge.report.reward.bins import Bin
from kedge.report.reward.calibration import Calibration
from kedge.report.reward.intervals import Interval, Share
from kedge.report.reward.length import LengthBias
from kedge.report.reward.members import Agreement
from kedge.report.reward.records import Combine, ScoredPair


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
    """The headline; which interval it has is said in `intervals`."""
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
