"""Questions of an exam put to a language model, wherever its weights are: in a folder, or in a run that trains them.

Choices go through the packed path, answers through the generator, programs into the sandbox.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kedge.core.errors import ConfigError, RewardError
from kedge.core.world import ALONE, World, once
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.examples import Messages
from kedge.data.template import encode_prompt
from kedge.exams.exam import (
    ChoiceQuestion,
    ChoiceReply,
    OpenQuestion,
    OpenReply,
    ProgramQuestion,
    ProgramReply,
    Question,
    Reply,
    ScoreQuestion,
    ScoreReply,
    Template,
    Turns,
)
from kedge.models.forward.heads import LanguageModel
from kedge.models.settings import AutoSize
from kedge.rewards.sandbox import Job, Limits, Outcome, run_all
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.answering import Answered
from kedge.stages.rl.choices import Renderer, choice_replies, encode, messages_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QuestionT = TypeVar("QuestionT", bound=Question)
Write = Callable[[Sequence[Messages], SamplingSettings, int], Answered]
"""So many answers to each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A language model as exams ask it."""

    name: str
    template: Template
    tokenizer: PreTrainedTokenizerBase
    """Of choices."""
    prompt_tokenizer: PreTrainedTokenizerBase
    """Of questions that are answered in words: its template is the one that they are written with."""
    tokenise: Callable[[], TextTokenizer]
    window: int | None
    model: Callable[[], LanguageModel]
    """Called when there are choices to compare."""
    write: Write
    rows: AutoSize = "auto"
    world: World = ALONE
    progress: Callable[[int], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """A reply to each question, in their order."""
        replies: dict[int, Reply] = {}
        _reply(replies, questions, ChoiceQuestion, self._choose)
        _reply(replies, questions, OpenQuestion, self._write)
        _reply(replies, questions, ProgramQuestion, partial(_run, self.world))
        _reply(replies, questions, ScoreQuestion, self._refuse_scores)
        return [replies[place] for place in range(len(questions))]

    def _choose(self, questions: Sequence[ChoiceQuestion]) -> list[ChoiceReply]:
        renderer = Renderer(self.tokenizer, self.template)
        encoded = list(encode(questions, renderer, self.tokenise(), window=self.window))
        self._report_cut(sum(question.is_cut for question in encoded))
        model = self.model()
        with model.active():
            return choice_replies(model, encoded, rows=self.rows, world=self.world, progress=self.progress)

    def _write(self, questions: Sequence[OpenQuestion]) -> list[OpenReply]:
        replies: dict[int, OpenReply] = {}
        for places in _alike(questions, lambda asked: (asked.max_new_tokens, asked.answers, asked.temperature)):
            part = [questions[place] for place in places]
            replies.update(zip(places, self._write_alike(part), strict=True))
        return [replies[place] for place in range(len(questions))]

    def _write_alike(self, questions: Sequence[OpenQuestion]) -> list[OpenReply]:
        """Questions with the same settings of sampling."""
        first = questions[0]
        prompts = [messages_of(own) for own in self._fitting(questions)]
        answered = self.write(prompts, sampling_of(first), first.answers)
        replies = zip(answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
        by_question = [[next(replies) for _ in range(first.answers)] for _ in questions]
        return [
            OpenReply(texts=tuple(text for text, _ in own), is_finished=tuple(is_finished for _, is_finished in own))
            for own in by_question
        ]

    def _fitting(self, questions: Sequence[OpenQuestion]) -> list[Turns]:
        """The turns of each question, without as many of the first examples as leave no room for an answer."""
        room = (self.window or sys.maxsize) - questions[0].max_new_tokens
        fitted: list[Turns] = []
        for question in questions:
            turns = question.turns
            while len(turns) > 2 and len(encode_prompt(self.prompt_tokenizer, messages_of(turns))) > room:
                turns = turns[2:]
            fitted.append(turns)
        self._report_cut(sum(turns is not question.turns for turns, question in zip(fitted, questions, strict=True)))
        return fitted

    def _report_cut(self, count: int) -> None:
        if count:
            self.say(f"  {self.name}: {count:,} questions without their first examples, which do not fit the window")

    def _refuse_scores(self, questions: Sequence[ScoreQuestion]) -> list[ScoreReply]:
        del questions
        raise ConfigError(f"{self.name} is a language model, and this exam asks for scores of a reward model")


def sampling_of(question: OpenQuestion) -> SamplingSettings:
    """How the answer to a question is drawn: without a temperature, the likeliest token each time."""
    sampling = {"max_new_tokens": question.max_new_tokens, "temperature": question.temperature or 1.0}
    return SamplingSettings.model_validate(sampling if question.temperature else {**sampling, "top_k": 1})


def _run(world: World, questions: Sequence[ProgramQuestion]) -> list[ProgramReply]:
    replies: dict[int, ProgramReply] = {}
    for places in _alike(questions, lambda question: question.seconds):
        part = [questions[place] for place in places]
        outcomes = once(world, lambda part=part: _run_programs(part))
        passed = [ProgramReply(passed=all(outcome.passed)) for outcome in outcomes]
        replies.update(zip(places, passed, strict=True))
    return [replies[place] for place in range(len(questions))]


_REACHED = "assert 1 + 1 == 2"
"""Runs after a program: one that leaves early, before the tests at its end, has not passed them."""


def _run_programs(questions: Sequence[ProgramQuestion]) -> list[Outcome]:
    """Programs in the sandbox, as many at once as there are cores; one that it cannot start is an error of ours."""
    seconds = questions[0].seconds
    limits = Limits(wall_s=seconds, cpu_s=max(1, round(seconds)))
    jobs = [Job(code=question.program, checks=(_REACHED,)) for question in questions]
    outcomes = run_all(jobs, limits, workers=os.cpu_count() or 1)
    if unstarted := next((outcome for outcome in outcomes if outcome.ending == "unstarted"), None):
        raise RewardError(f"the sandbox cannot run the programs of an exam: {unstarted.detail}")
    return outcomes


def _reply(
    replies: dict[int, Reply],
    questions: Sequence[Question],
    kind: type[QuestionT],
    answer_all: Callable[[Sequence[QuestionT]], Sequence[Reply]],
) -> None:
    """Put the replies to all questions of a kind into their places."""
    own = {place: question for place, question in enumerate(questions) if isinstance(question, kind)}
    if own:
        replies.update(zip(own, answer_all(list(own.values())), strict=True))


def _alike(questions: Sequence[QuestionT], key: Callable[[QuestionT], object]) -> list[list[int]]:
    """The places of questions with the same key."""
    places: dict[object, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(key(question), []).append(place)
    return list(places.values())
