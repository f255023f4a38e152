"""Scores and the rows without one: why an answer has none, how many have none, and too many of them stop the run.

Each source has a counter. It is part of a run's state, so that a resumed run stops where an uninterrupted one would.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kedge.core.answers import Answer, TextSource
from kedge.core.errors import KedgeError, RewardError
from kedge.core.protocols import RewardSource
from kedge.rewards.settings import FailureSettings

if TYPE_CHECKING:
    from torch import Tensor

    from kedge.core.records import Rollouts

_REASON_CHARS = 200
_REASONS_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    source: str
    rows: int
    failed: int
    in_window: int
    """How many of the latest rows failed."""
    reasons: Mapping[str, int]
    """Why, with the number of rows; the most common reasons first."""


class FailureCounter:
    """Counts the rows that one source could not score. More than `max_share` of a full window is a RewardError."""

    def __init__(self, source: str, settings: FailureSettings) -> None:
        self.source = source
        self._settings = settings
        self._rows = 0
        self._failed = 0
        self._window = deque[bool](maxlen=settings.window)
        self._reasons = Counter[str]()

    def add(self, results: Sequence[ScoreResult]) -> None:
        failures = [result for result in results if not result.is_scored]
        self._rows += len(results)
        self._failed += len(failures)
        self._window.extend(not result.is_scored for result in results)
        for result in failures:
            reason = " ".join(result.reason.split())[:_REASON_CHARS]
            is_kept = reason in self._reasons or len(self._reasons) < _REASONS_KEPT
            self._reasons[reason if is_kept else "other reasons"] += 1
        # Against the full window: one failure among the first three rows is no reason to stop.
        if sum(self._window) > self._settings.max_share * self._settings.window:
            raise RewardError(self._message())

    def report(self, top: int = 5) -> FailureReport:
        return FailureReport(
            source=self.source,
            rows=self._rows,
            failed=self._failed,
            in_window=sum(self._window),
            reasons=dict(self._reasons.most_common(top)),
        )

    def state(self) -> dict[str, Any]:
        """Everything counted so far, as plain JSON."""
        window = "".join("1" if failed else "0" for failed in self._window)
        return {"rows": self._rows, "failed": self._failed, "window": window, "reasons": dict(self._reasons)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._rows, self._failed = state["rows"], state["failed"]
        self._window = deque((mark == "1" for mark in state["window"]), maxlen=self._settings.window)
        self._reasons = Counter(state["reasons"])

    def _message(self) -> str:
        listed = "; ".join(f"{reason} ({count}x)" for reason, count in self._reasons.most_common(3))
        return (
            f"reward '{self.source}' gave no score to {sum(self._window)} of its last {len(self._window)} answers; "
            f"allowed are {self._settings.max_share:.0%} of {self._settings.window}. Reasons: {listed}. Mend the "
            "source, or allow more failures"
        )


class CountedSource:
    """A source whose failures are counted: a row that cannot be scored gets NaN and a reason, never an exception."""

    def __init__(self, source: TextSource, counter: FailureCounter) -> None:
        self._source = source
        self._counter = counter

    def judge(self, answers: Sequence[Answer]) -> list[ScoreResult]:
        results = results_of(self._source, answers)
        if len(results) != len(answers):
            raise RewardError(
                f"reward '{self._counter.source}' gave {len(results)} scores for {len(answers)} answers; one for each "
                "is needed"
            )
        self._counter.add(results)
        return results

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [result.score for result in self.judge(answers)]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    score: float
    """NaN where the answer could not be scored."""
    reason: str = ""
    """Why it could not."""

    @property
    def is_scored(self) -> bool:
        return math.isfinite(self.score)


def unscored(reason: str) -> ScoreResult:
    return ScoreResult(math.nan, reason)


@dataclass(frozen=True, slots=True)
class Source:
    """A `TextSource` that also says why a row has no score."""

    judge: Callable[[Sequence[Answer]], list[ScoreResult]]

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [result.score for result in self.judge(answers)]


def results_of(source: TextSource, answers: Sequence[Answer]) -> list[ScoreResult]:
    """One result a row from any source. Where it raises, no row has a score; a KedgeError is passed on."""
    if not answers:
        return []
    if isinstance(source, Source):
        return source.judge(answers)
    try:
        scores = source.score(answers)
    except KedgeError:
        raise
    except Exception as error:
        return [unscored(f"{type(error).__name__}: {error}")] * len(answers)
    return [ScoreResult(score) if math.isfinite(score) else unscored("the source gave no number") for score in scores]


def per_answer(judge_one: Callable[[Answer], ScoreResult]) -> Source:
    return Source(lambda answers: [judge_one(answer) for answer in answers])


def needs_solution(judge_all: Callable[[Sequence[Answer], list[str]], list[ScoreResult]]) -> Source:
    """A source that compares with the known solution; rows without one have no score."""

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        solved = [(answer, answer.solution) for answer in answers if answer.solution is not None]
        results = iter(judge_all([answer for answer, _ in solved], [solution for _, solution in solved]))
        missing = unscored("the prompt has no known solution")
        return [missing if answer.solution is None else next(results) for answer in answers]

    return Source(judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A source, and the failure counters of the sources that it is made of."""

    source: RewardSource
    failure_counters: tuple[FailureCounter, ...]

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.source.score(rollouts)
