"""A score, or why an answer has none: what code of the user's returned is read as scores, rows without one are counted,
and too many of them stop the run.

Every wrong kind of result has one message, with the source and the row. Each source has a counter. It is part of a
run's state, so that a resumed run stops where an uninterrupted one would.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsFloat

from kedge.core.answers import Answer, TextSource
from kedge.core.errors import KedgeError, RewardError
from kedge.core.protocols import RewardSource
from kedge.core.urls import redacted
from kedge.core.world import ALONE, World, together
from kedge.rewards.settings import FailureSettings

if TYPE_CHECKING:
    from torch import Tensor

    from kedge.core.records import Rollouts


_REASON_CHARS = 200
_REASONS_KEPT = 100
Announce = Callable[[str], None]


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
    """Counts the rows that one source could not score. More than `max_share` of a full window is a RewardError.

    The first failure is announced at once: a source that is off is seen before anything is paid for.
    """

    def __init__(self, source: str, settings: FailureSettings, announce: Announce = lambda _: None) -> None:
        self.source = source
        self._settings = settings
        self._announce = announce
        self._rows = 0
        self._failed = 0
        self._window = deque[bool](maxlen=settings.window)
        self._reasons = Counter[str]()

    def add(self, results: Sequence[ScoreResult]) -> None:
        first, seen_before, rows_before = None, self._failed, self._rows
        for row, result in enumerate(results, start=1):
            if result.is_scored:
                continue
            reason = redacted(" ".join(result.reason.split()))[:_REASON_CHARS]
            first = first or (rows_before + row, reason)
            self._failed += 1
            is_kept = reason in self._reasons or len(self._reasons) < _REASONS_KEPT
            self._reasons[reason if is_kept else "other reasons"] += 1
        self._rows += len(results)
        self._window.extend(not result.is_scored for result in results)
        if first and not seen_before:
            self._announce(f"{self.source}: answer {first[0]:,} is the first without a score: {first[1]}")
        # Against the full window: one failure among the first three rows is no reason to stop.
        if sum(self._window) > self._settings.max_share * self._settings.window:
            raise _source_failed([self], self._rows) if self.never_scored else RewardError(self._message())

    @property
    def never_scored(self) -> bool:
        """Whether it was asked, and had no score for any answer."""
        return self._rows == self._failed > 0

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

    def reasons(self) -> str:
        """The most common reasons in one line."""
        return "; ".join(f"{reason} ({count}x)" for reason, count in self._reasons.most_common(3))

    def _message(self) -> str:
        return (
            f"reward '{self.source}' gave no score to {sum(self._window)} of its last {len(self._window)} answers; "
            f"allowed are {self._settings.max_share:.0%} of {self._settings.window}. Reasons: {self.reasons()}. Mend "
            "the source, or allow more failures"
        )


def refuse_never_scored(counters: Iterable[FailureCounter]) -> None:
    """A RewardError that names the sources without a single score so far."""
    if silent := [counter for counter in counters if counter.never_scored]:
        raise _source_failed(silent, max(counter.report().rows for counter in silent))


def refuse_unscored(scores: Sequence[float], counters: Iterable[FailureCounter]) -> None:
    """A RewardError where none of the scores is one; `counters` know why."""
    if scores and not any(map(math.isfinite, scores)):
        raise _source_failed([counter for counter in counters if counter.report().failed], len(scores))


def _source_failed(counters: Sequence[FailureCounter], rows: int) -> RewardError:
    names = ", ".join(f"'{counter.source}'" for counter in counters)
    reasons = "; ".join(counter.reasons() for counter in counters)
    return RewardError(
        f"the reward source failed: {names} gave no score to any of {rows:,} answers. Reasons: {reasons}. Mend the "
        "source, then go on with --resume"
    )


class CountedSource:
    """A source whose failures are counted: a row that cannot be scored gets NaN and a reason, never an exception.

    The processes of `world` ask it about their share of the answers, and count the failures of all.
    """

    def __init__(self, source: TextSource, counter: FailureCounter, *, world: World = ALONE) -> None:
        self._source, self._counter, self._world = source, counter, world

    def judge(self, answers: Sequence[Answer]) -> list[ScoreResult]:
        results = _judged_together(self._world, answers, self._ask)
        self._counter.add(results)
        return results

    def _ask(self, answers: Sequence[Answer]) -> list[ScoreResult]:
        results = results_of(self._source, answers, name=f"reward '{self._counter.source}'")
        if len(results) != len(answers):
            raise RewardError(
                f"reward '{self._counter.source}' gave {len(results)} scores for {len(answers)} answers; one for each "
                "is needed"
            )
        return results

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [result.score for result in self.judge(answers)]


def _judged_together(
    world: World, answers: Sequence[Answer], judge: Callable[[Sequence[Answer]], list[ScoreResult]]
) -> list[ScoreResult]:
    """`judge` on this process's share; the results of all processes, in the order of the answers.

    Every answer is asked about once in all, beside the others to its prompt. What `judge` refuses on one process is
    refused on all.
    """
    if world.size == 1:
        return judge(answers)
    rows_of: dict[Hashable, list[int]] = {}
    for row, answer in enumerate(answers):
        rows_of.setdefault(answer.prompt, []).append(row)
    own = [row for rows in world.mine(list(rows_of.values())) for row in rows]
    shares = together(world, lambda: dict(zip(own, judge([answers[row] for row in own]), strict=True)))
    results = ChainMap(*shares)
    return [results[row] for row in range(len(answers))]


@dataclass(frozen=True, slots=True)
class Source:
    """A `TextSource` that also says why a row has no score."""

    judge: Callable[[Sequence[Answer]], list[ScoreResult]]

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [result.score for result in self.judge(answers)]


def results_of(source: TextSource, answers: Sequence[Answer], *, name: str) -> list[ScoreResult]:
    """One result a row from any source, which messages call `name`. Where it raises, no row has a score; a KedgeError
    is passed on."""
    if not answers:
        return []
    if isinstance(source, Source):
        return source.judge(answers)
    try:
        scores: Any = source.score(answers)
    except (KedgeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return [failure(error)] * len(answers)
    return read_scores(scores, len(answers), name=name, giver="the source")


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


_LARGEST = 3.4028234663852886e38
"""The largest float32, which scores become."""
_SHOWN_CHARS = 60


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


def failure(error: BaseException) -> ScoreResult:
    """No score, because code of the user's raised. That includes SystemExit: a reward does not end a run."""
    return unscored(f"{type(error).__name__}: {error}")


def score_of(value: SupportsFloat, *, giver: str) -> ScoreResult:
    """A number as a score; one that is not finite, or too large for the float32 that it becomes, is none.

    >>> score_of(10**400, giver="the server").reason
    'the server gave a number too large for a score'
    """
    try:
        number = float(value)
    except OverflowError:
        return unscored(f"{giver} gave a number too large for a score")
    if not math.isfinite(number):
        return unscored(f"{giver} gave {number}")
    if abs(number) > _LARGEST:
        return unscored(f"{giver} gave {number:g}, too large for a score")
    return ScoreResult(number)


def read_scores(returned: Any, rows: int, *, name: str, giver: str = "the function") -> list[ScoreResult]:
    """One result an answer; `name` is what messages call the function or plugin that returned it.

    >>> read_scores([1, None, True], 3, name="f")[2]
    ScoreResult(score=1.0, reason='')
    """
    scores = _as_list(returned, rows, name)
    if len(scores) != rows:
        raise RewardError(f"{name} returned {len(scores)} scores for {rows} answers; one for each is needed")
    return [read_score(score, name=name, row=row, rows=rows, giver=giver) for row, score in enumerate(scores, start=1)]


def read_score(score: Any, *, name: str, row: int, rows: int, giver: str = "the function") -> ScoreResult:
    """One score, of answer `row` of `rows`: a number, or None for no score. True and False are 1 and 0."""
    if score is None:
        return unscored(f"{giver} gave None")
    shape = _shape(score)
    if shape is not None and all(size == 1 for size in shape):  # a scalar of torch or numpy
        score = score.item()
    if not isinstance(score, Real):
        what = type(score).__name__ if shape is None else f"{type(score).__name__} of shape {shape}"
        raise RewardError(
            f"{name} returned {_shown(score)} as the score of answer {row} of {rows}, a {what}; expected a number or "
            "None"
        )
    return score_of(score, giver=giver)


def _as_list(returned: Any, rows: int, name: str) -> list[Any]:
    expected = f"expected a list of {rows} numbers"
    shape = _shape(returned)
    if shape is not None:
        if len(shape) != 1:
            raise RewardError(f"{name} returned a {type(returned).__name__} of shape {shape}, {expected}")
        return list(returned.tolist())  # at once: from an accelerator each number would be a wait of its own
    if isinstance(returned, Iterable) and not isinstance(returned, Sized):
        raise RewardError(f"{name} returned a {type(returned).__name__}, {expected}; put list(…) around it")
    if not isinstance(returned, Iterable) or isinstance(returned, Mapping | Set | str | bytes):
        raise RewardError(f"{name} returned a {type(returned).__name__}, {expected}")
    return list(returned)


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of an array of torch, numpy or their like; None for anything else."""
    shape = getattr(value, "shape", None)
    return None if shape is None or not hasattr(value, "tolist") else tuple(shape)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
