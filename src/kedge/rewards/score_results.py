"""The result of scoring one answer: a score, or why there is none. Sources are functions from answers to results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kedge.core.answers import Answer, TextSource
from kedge.core.errors import KedgeError


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
