"""A model that takes an exam: choices by the packed path, answers by the generator, programs in the sandbox, scores by
a reward model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, RewardError
from kedge.core.seeds import seed_for
from kedge.core.world import ALONE, World, once
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.examples import Message
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
    Turns,
)
from kedge.models.forward.heads import LanguageModel, language_model
from kedge.models.loading.describe import context_window
from kedge.models.loading.load import DTypeName, load_causal
from kedge.models.settings import AutoSize
from kedge.rewards.model import on_text
from kedge.rewards.sandbox import Job, Limits, Outcome, run_all
from kedge.rewards.settings import ModelSource
from kedge.rollout.settings import SamplingSettings
from kedge.stages.exam.choices import Renderer, choice_replies, encode, messages_of
from kedge.stages.exam.settings import Template
from kedge.stages.rl.answering import Answering, answer
from kedge.stages.rl.judge import Judge, find_judge, is_reward_model, load_judge
from kedge.stages.rl.reward import scorer_of
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QuestionT = TypeVar("QuestionT", bound=Question)
Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Examinee:
    """`place` is a folder, an alias or a hub id. Weights are loaded when the first question needs them."""

    name: str
    place: str
    chat_template: str | None
    device: str
    dtype: DTypeName
    rows: AutoSize
    seed: int
    world: World = ALONE
    progress: Progress = lambda _: None
    say: Callable[[str], None] = lambda _: None

    @cached_property
    def is_reward_model(self) -> bool:
        place = find_judge(self.place) if Path(self.place).is_dir() else self.place
        return is_reward_model(Path(place))

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_causal(self.place, dtype=self.dtype, device=pick_device(self.device))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_for(self.place, self.chat_template)

    def ask(self, template: Template, questions: Sequence[Question]) -> list[Reply]:
        """A reply to each question, in their order."""
        if self.is_reward_model and not all(isinstance(question, ScoreQuestion) for question in questions):
            raise ConfigError(
                f"{self.name} is a reward model: it scores answers and writes none, so it can take reward_pairs alone"
            )
        replies: dict[int, Reply] = {}
        _reply(replies, questions, ChoiceQuestion, partial(self._choose, template))
        _reply(replies, questions, OpenQuestion, partial(self._write, template))
        _reply(replies, questions, ProgramQuestion, self._run)
        _reply(replies, questions, ScoreQuestion, self._score)
        return [replies[place] for place in range(len(questions))]

    @cached_property
    def _language_model(self) -> LanguageModel:
        return language_model(self.model)

    @cached_property
    def _window(self) -> int | None:
        return context_window(self.place)

    def _report_cut(self, count: int) -> None:
        if count:
            self.say(f"  {self.name}: {count:,} questions without their first examples, which do not fit the window")

    @cached_property
    def _tokenise(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer, for_many=True)

    def _choose(self, template: Template, questions: Sequence[ChoiceQuestion]) -> list[ChoiceReply]:
        renderer = Renderer(self.tokenizer, template)
        encoded = list(encode(questions, renderer, self._tokenise, window=self._window))
        self._report_cut(sum(question.is_cut for question in encoded))
        model = self._language_model
        with model.active():
            return choice_replies(model, encoded, rows=self.rows, world=self.world, progress=self.progress)

    def _write(self, template: Template, questions: Sequence[OpenQuestion]) -> list[OpenReply]:
        replies: dict[int, OpenReply] = {}
        for places in _alike(questions, lambda asked: (asked.max_new_tokens, asked.answers, asked.temperature)):
            part = [questions[place] for place in places]
            replies.update(zip(places, self._write_alike(template, part), strict=True))
        return [replies[place] for place in range(len(questions))]

    def _write_alike(self, template: Template, questions: Sequence[OpenQuestion]) -> list[OpenReply]:
        """Questions with the same settings of sampling."""
        first = questions[0]
        chat_template = "plain" if template == "plain" else self.chat_template
        turns = self._fitting(questions, tokenizer_for(self.place, chat_template))
        sampling = {"max_new_tokens": first.max_new_tokens, "temperature": first.temperature or 1.0}
        request = Answering(
            model=self.place,
            sampling=SamplingSettings.model_validate(sampling if first.temperature else {**sampling, "top_k": 1}),
            answers=first.answers,
            seed=seed_for(self.seed, "exam"),
            chat_template=chat_template,
            device=self.device,
            dtype=self.dtype,
            rows=self.rows,
        )
        prompts = [messages_of(own) for own in turns]
        answered = answer(request, prompts, progress=self.progress, world=self.world, load=lambda: self.model)
        replies = zip(answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
        by_question = [[next(replies) for _ in range(first.answers)] for _ in questions]
        return [
            OpenReply(texts=tuple(text for text, _ in own), is_finished=tuple(is_finished for _, is_finished in own))
            for own in by_question
        ]

    def _fitting(self, questions: Sequence[OpenQuestion], tokenizer: PreTrainedTokenizerBase) -> list[Turns]:
        """The turns of each question, without as many of the first examples as leave no room for an answer."""
        room = (self._window or sys.maxsize) - questions[0].max_new_tokens
        fitted: list[Turns] = []
        for question in questions:
            turns = question.turns
            while len(turns) > 2 and len(encode_prompt(tokenizer, messages_of(turns))) > room:
                turns = turns[2:]
            fitted.append(turns)
        self._report_cut(sum(turns is not question.turns for turns, question in zip(fitted, questions, strict=True)))
        return fitted

    def _run(self, questions: Sequence[ProgramQuestion]) -> list[ProgramReply]:
        replies: dict[int, ProgramReply] = {}
        for places in _alike(questions, lambda question: question.seconds):
            part = [questions[place] for place in places]
            outcomes = once(self.world, lambda part=part: run_programs(part))
            passed = [ProgramReply(passed=all(outcome.passed)) for outcome in outcomes]
            replies.update(zip(places, passed, strict=True))
        return [replies[place] for place in range(len(questions))]

    @cached_property
    def _judge(self) -> Judge:
        if not self.is_reward_model:
            raise ConfigError(f"{self.name} is a language model, and this exam asks for scores of a reward model")
        return load_judge(self.place, device=self.device)

    def _score(self, questions: Sequence[ScoreQuestion]) -> list[ScoreReply]:
        judge = self._judge
        source = ModelSource.model_validate({"kind": "model", "from": judge.place, "rows": self.rows})

        def tokens(answer: Answer) -> list[int]:
            return judge.encoder.tokens(messages_of(answer.prompt), (Message("assistant", answer.text),))

        answers = [
            Answer(prompt=question.turns, text=text, is_finished=True)
            for question in questions
            for text in question.answers
        ]
        results = on_text(scorer_of(judge), source, tokens).judge(answers)
        if unscored := next((result for result in results if not result.is_scored), None):
            raise RewardError(f"{self.name} has no score for an answer of the exam: {unscored.reason}")
        scores = iter(result.score for result in results)
        return [ScoreReply(scores=tuple(next(scores) for _ in question.answers)) for question in questions]


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


_REACHED = "assert 1 + 1 == 2"
"""Runs after a program: one that leaves early, before the tests at its end, has not passed them."""


def run_programs(questions: Sequence[ProgramQuestion]) -> list[Outcome]:
    """Programs in the sandbox, as many at once as there are cores; one that it cannot start is an error of ours."""
    seconds = questions[0].seconds
    limits = Limits(wall_s=seconds, cpu_s=max(1, round(seconds)))
    jobs = [Job(code=question.program, checks=(_REACHED,)) for question in questions]
    outcomes = run_all(jobs, limits, workers=os.cpu_count() or 1)
    if unstarted := next((outcome for outcome in outcomes if outcome.ending == "unstarted"), None):
        raise RewardError(f"the sandbox cannot run the programs of an exam: {unstarted.detail}")
    return outcomes


def _alike(questions: Sequence[QuestionT], key: Callable[[QuestionT], object]) -> list[list[int]]:
    """The places of questions with the same key."""
    places: dict[object, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(key(question), []).append(place)
    return list(places.values())
