"""A model in a folder that takes an exam: a language model is asked as `kedge.stages.rl.asking` does, a reward model
for scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, RewardError
from kedge.core.seeds import seed_for
from kedge.core.world import ALONE, World
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.examples import Message, Messages
from kedge.exams.exam import Question, Reply, ScoreQuestion, ScoreReply, Template
from kedge.models.forward.heads import LanguageModel, language_model
from kedge.models.loading.describe import context_window
from kedge.models.loading.load import DTypeName, load_causal
from kedge.models.settings import AutoSize
from kedge.rewards.model import on_text
from kedge.rewards.settings import ModelSource
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.answering import Answered, Answering, answer
from kedge.stages.rl.asking import Speaker
from kedge.stages.rl.choices import messages_of
from kedge.stages.rl.judge import Judge, find_judge, is_reward_model, load_judge
from kedge.stages.rl.reward import scorer_of
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        if not self.is_reward_model:
            return self._speaker(template).ask(questions)
        scored = [question for question in questions if isinstance(question, ScoreQuestion)]
        if len(scored) < len(questions):
            raise ConfigError(
                f"{self.name} is a reward model: it scores answers and writes none, so it can take reward_pairs alone"
            )
        return list(self._score(scored))

    @cached_property
    def _language_model(self) -> LanguageModel:
        return language_model(self.model)

    @cached_property
    def _tokenise(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer, for_many=True)

    def _speaker(self, template: Template) -> Speaker:
        chat_template = "plain" if template == "plain" else self.chat_template
        return Speaker(
            name=self.name,
            template=template,
            tokenizer=self.tokenizer,
            prompt_tokenizer=tokenizer_for(self.place, chat_template),
            tokenise=lambda: self._tokenise,
            window=context_window(self.place),
            model=lambda: self._language_model,
            write=partial(self._write, chat_template),
            rows=self.rows,
            world=self.world,
            progress=self.progress,
            say=self.say,
        )

    def _write(
        self, chat_template: str | None, prompts: Sequence[Messages], sampling: SamplingSettings, answers: int
    ) -> Answered:
        request = Answering(
            model=self.place,
            sampling=sampling,
            answers=answers,
            seed=seed_for(self.seed, "exam"),
            chat_template=chat_template,
            device=self.device,
            dtype=self.dtype,
            rows=self.rows,
        )
        return answer(request, prompts, progress=self.progress, world=self.world, load=lambda: self.model)

    @cached_property
    def _judge(self) -> Judge:
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
