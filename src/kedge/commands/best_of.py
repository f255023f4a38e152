"""What `kedge sample --best-of` adds: every answer scored by a reward model, and the best one to each prompt named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.core.stats import best_of_kl
from kedge.data.examples import Message, Messages, Role
from kedge.rewards.failures import ScoreResult
from kedge.rewards.model import on_text
from kedge.rewards.settings import ModelSource
from kedge.stages.rl.answering import Answered
from kedge.stages.rl.judge import Judge, load_judge
from kedge.stages.rl.reward import scorer_of


def judge_for(best_of: int | None, reward: str | None, answers: int, *, device: str) -> Judge | None:
    """Who chooses; None where nobody was asked to. What cannot be is refused now rather than after sampling."""
    if best_of is None and reward is None:
        return None
    if best_of is None or reward is None:
        given, missing = ("--best-of N", "--reward") if reward is None else ("--reward", "--best-of N")
        raise ConfigError(f"{given} goes with {missing}: N answers are sampled, and the reward model names the best")
    if answers != 1:
        raise ConfigError(f"--answers {answers} and --best-of {best_of}: give one of them; --json shows all answers")
    return load_judge(reward, device=device)


def verdicts(judge: Judge, prompts: Sequence[Messages], answered: Answered, *, answers: int) -> list[ScoreResult]:
    """What the judge says of each answer, read as text as `kedge score` reads it; or why it says nothing."""
    source = ModelSource.model_validate({"kind": "model", "from": judge.place})
    told = [
        Answer(
            prompt=tuple((message.role, message.content) for message in prompts[row // answers]),
            text=text,
            is_finished=is_finished,
        )
        for row, (text, is_finished) in enumerate(
            zip(answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
        )
    ]

    def encode(answer: Answer) -> list[int]:
        prompt = tuple(Message(cast(Role, role), content) for role, content in answer.prompt)
        return judge.encoder.tokens(prompt, (Message("assistant", answer.text),))

    return on_text(scorer_of(judge), source, encode).judge(told)


def with_best(rows: Sequence[Mapping[str, Any]], told: Sequence[ScoreResult], *, n: int) -> Iterator[dict[str, Any]]:
    """The rows with their scores, the best of each n marked, and with it how far the best of n is from one answer."""
    for at in range(0, len(rows), n):
        scored = [index for index in range(at, at + n) if told[index].is_scored]
        best = max(scored, key=lambda index: told[index].score, default=None)
        for index in range(at, at + n):
            score = told[index].score
            yield {
                **rows[index],
                "score": None if math.isnan(score) else score,
                **({"unscored": told[index].reason} if math.isnan(score) else {}),
                "best": index == best,
                "best_of": n,
                "kl": best_of_kl(n),
            }


def choose(
    judge: Judge, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Messages], answered: Answered, *, n: int
) -> list[dict[str, Any]]:
    """All rows with scores, the best ones marked."""
    return list(with_best(rows, verdicts(judge, prompts, answered, answers=n), n=n))
