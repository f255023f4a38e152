"""Exams taken by a function instead of a model."""

from __future__ import annotations

from collections.abc import Callable

from kedge.exams.exam import ChoiceQuestion, ChoiceReply, Exam, OpenQuestion, OpenReply, Question, Reply, ScoreQuestion
from kedge.exams.exam import ScoreReply as Scores
from kedge.exams.sitting import Sitting, sit


def taken(
    exam: Exam,
    *,
    choose: Callable[[ChoiceQuestion], list[float]] = lambda question: [0.0] * len(question.choices),
    write: Callable[[OpenQuestion], str] = lambda question: "",
    score: Callable[[str], float] = len,
) -> Sitting:
    def reply(question: Question) -> Reply:
        match question:
            case ChoiceQuestion():
                return ChoiceReply(logprobs=tuple(choose(question)))
            case OpenQuestion():
                return OpenReply(texts=(write(question),), is_finished=(True,))
            case ScoreQuestion():
                return Scores(scores=tuple(map(score, question.answers)))
            case _:
                raise AssertionError(question)

    return sit(exam, lambda questions: [reply(question) for question in questions], seed=0)


def by_item(sitting: Sitting, metric: str) -> dict[str, float]:
    return {score.item: score.score for score in sitting.scores if score.metric == metric}


def picking(letter: str) -> Callable[[ChoiceQuestion], list[float]]:
    """Somebody who always takes this choice."""
    return lambda question: [0.0 if choice == letter else -9.0 for choice in question.choices]
