"""One model takes one exam: questions go out, replies come back, until there are scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.core.errors import KedgeError
from kedge.exams.exam import (
    ChoiceQuestion,
    ChoiceReply,
    Exam,
    OpenQuestion,
    OpenReply,
    ProgramQuestion,
    ProgramReply,
    Question,
    Reply,
    Score,
    ScoreQuestion,
    ScoreReply,
)
from kedge.exams.items import hash_of_text
from kedge.exams.rows import ItemRow

Ask = Callable[[Sequence[Question]], Sequence[Reply]]
"""The engine: a reply to each question, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    scores: tuple[Score, ...]
    answers: tuple[dict[str, Any], ...]
    """A row for each question that was answered in words or by a choice, for people to read."""
    has_choices_alone: bool
    """Whether nothing but choices was asked."""


def sit(exam: Exam, ask: Ask, *, seed: int) -> Sitting:
    """Ask until the exam has its scores. A score that is not finite, or of no metric of the exam, is an error."""
    dialogue = exam.take(seed)
    answers: list[dict[str, Any]] = []
    has_choices_alone = True
    try:
        questions = next(dialogue)
        while True:
            replies = ask(questions)
            has_choices_alone &= all(isinstance(question, ChoiceQuestion) for question in questions)
            answers += _answer_rows(questions, replies)
            questions = dialogue.send(replies)
    except StopIteration as end:
        scores: list[Score] = end.value
    for score in scores:
        if score.metric not in exam.metrics or not math.isfinite(score.score):
            raise KedgeError(
                f"the exam {exam.name} gives {score.score} as {score.metric} of {score.item}; its metrics are "
                f"{', '.join(exam.metrics)}, and scores are finite"
            )
    return Sitting(scores=tuple(scores), answers=tuple(answers), has_choices_alone=has_choices_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an exam asks of a model: choices to compare, answers to write and the most tokens they can have."""

    items: int
    choices: int = 0
    answers: int = 0
    tokens: int = 0
    programs: int = 0
    has_scores: bool = False
    """Whether it asks for scores, which only a reward model has."""


def cost_of(exam: Exam) -> Cost:
    """By asking it with nobody there: every choice equally likely, every answer empty."""
    asked: list[Question] = []

    def ask(questions: Sequence[Question]) -> list[Reply]:
        asked.extend(questions)
        return [_nothing(question) for question in questions]

    scores = sit(exam, ask, seed=0).scores
    written = [question for question in asked if isinstance(question, OpenQuestion)]
    return Cost(
        items=len({score.item for score in scores}),
        choices=sum(len(question.choices) for question in asked if isinstance(question, ChoiceQuestion)),
        answers=sum(question.answers for question in written),
        tokens=sum(question.answers * question.max_new_tokens for question in written),
        programs=sum(isinstance(question, ProgramQuestion) for question in asked),
        has_scores=any(isinstance(question, ScoreQuestion) for question in asked),
    )


def _nothing(question: Question) -> Reply:
    match question:
        case ChoiceQuestion():
            return ChoiceReply(logprobs=(0.0,) * len(question.choices))
        case OpenQuestion():
            return OpenReply(texts=("",) * question.answers, is_finished=(True,) * question.answers)
        case ProgramQuestion():
            return ProgramReply(passed=False)
        case ScoreQuestion():
            return ScoreReply(scores=(0.0,) * len(question.answers))


def item_rows(exam: str, model: str, scores: Sequence[Score], *, seed: int) -> Iterator[ItemRow]:
    """The scores as rows of `items.jsonl`."""
    for score in scores:
        yield ItemRow(
            exam=exam,
            metric=score.metric,
            item=score.item,
            cluster=score.cluster or score.item,
            model=model,
            score=score.score,
            answer=hash_of_text(score.answer),
            seed=seed,
            groups=dict(score.groups),
        )


def _answer_rows(questions: Sequence[Question], replies: Sequence[Reply]) -> Iterator[dict[str, Any]]:
    for question, reply in zip(questions, replies, strict=True):
        if isinstance(question, OpenQuestion) and isinstance(reply, OpenReply):
            for number, (text, is_finished) in enumerate(zip(reply.texts, reply.is_finished, strict=True)):
                prompt = [{"role": role, "content": content} for role, content in question.turns]
                row = {"item": question.item, "number": number, "prompt": prompt, "answer": text}
                yield {**row, "finished": is_finished}
        elif isinstance(question, ChoiceQuestion) and isinstance(reply, ChoiceReply):
            # The examples before a question are the same for thousands of them: they are left out.
            role, content = question.turns[-1]
            chosen = max(range(len(reply.logprobs)), key=reply.logprobs.__getitem__)
            yield {
                "item": question.item,
                "number": 0,
                "prompt": [{"role": role, "content": content}],
                "answer": question.choices[chosen],
                "choices": list(question.choices),
                "logprobs": list(reply.logprobs),
            }
