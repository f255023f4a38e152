"""Exams whose answers are written: every question is asked at once, every answer is graded by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kedge.exams.exam import Dialogue, Metric, OpenQuestion, OpenReply, Reply, Score

Grade = Callable[[str, OpenReply], Iterable[Score]]
"""From the name of an item and its answers to its scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenExam:
    name: str
    title: str
    licence: str
    metrics: Mapping[str, Metric]
    items_hash: str
    questions: tuple[OpenQuestion, ...]
    grade: Grade

    def take(self, seed: int) -> Dialogue:
        del seed  # nothing is drawn here; the engine draws the answers
        replies = yield self.questions
        return [
            score
            for question, reply in zip(self.questions, replies, strict=True)
            for score in self.grade(question.item, open_reply(reply))
        ]


def open_reply(reply: Reply) -> OpenReply:
    assert isinstance(reply, OpenReply)
    return reply
