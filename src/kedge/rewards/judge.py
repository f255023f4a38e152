"""A language model as a judge, behind any OpenAI-compatible endpoint: grades of one answer, and comparisons of two.

How it is asked and how its reply is read: `judge_protocol`. A comparison is asked in both orders, because judges favour
a position; left out: several votes, batching APIs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.core.seeds import seed_for
from kedge.core.suggest import did_you_mean
from kedge.rewards.client import Call, CallFailed, Client, Endpoint, key_from
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, unscored
from kedge.rewards.judge_protocol import COMPARISON, RUBRIC, fence_of, read_score, read_winner
from kedge.rewards.settings import JudgeSource

_VARIABLES = ("prompt", "answer", "solution", "extra", "lowest", "highest", "fence")
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """How much the first answer is preferred to the second: 1, 0.5 (a tie, or the orders disagree), 0, or NaN."""

    first: float
    is_consistent: bool
    """Whether both orders gave the same winner."""
    reason: str = ""


def make(settings: JudgeSource, context: RewardContext) -> Source:
    client = _client(settings)
    rubric = _ENVIRONMENT.from_string(_checked(settings.rubric or RUBRIC))

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        results: dict[int, ScoreResult] = {}
        calls: dict[int, Call[float]] = {}
        for row, answer in enumerate(answers):
            fence = fence_of(context.seed, [*_shown(answer), answer.text])
            try:
                text = rubric.render(_template_variables(answer, settings, fence))
            except Exception as error:  # a template can fail in any way, for a row whose record lacks something
                results[row] = unscored(f"judge.rubric: {type(error).__name__}: {error}")
                continue
            read = partial(_grade, settings=settings, fence=fence)
            calls[row] = Call(body=_body(settings, text), read=read, rng=_rng(context, row))
        for row, result in zip(calls, client.call_all(list(calls.values())), strict=True):
            results[row] = unscored(str(result)) if isinstance(result, CallFailed) else ScoreResult(result)
        return [results[row] for row in range(len(answers))]

    return Source(judge)


def compare(pairs: Sequence[tuple[Answer, Answer]], settings: JudgeSource, context: RewardContext) -> list[Preference]:
    """Which of two answers to the same prompt is better: the judge compares each pair in both orders."""
    client, template = _client(settings), _ENVIRONMENT.from_string(COMPARISON)
    calls: list[Call[float]] = []
    for index, (first, second) in enumerate(pairs):
        for a, b in ((first, second), (second, first)):
            fence = fence_of(context.seed, [*_shown(first), a.text, b.text])
            text = template.render(prompt=first.prompt, first=a.text, second=b.text, fence=fence)
            read = partial(_better, fence=fence)
            calls.append(Call(body=_body(settings, text), read=read, rng=_rng(context, index)))
    wins = client.call_all(calls)
    return [_preference(*wins[at : at + 2]) for at in range(0, len(wins), 2)]


def _preference(as_first: float | CallFailed, as_second: float | CallFailed) -> Preference:
    """From what the first answer won in its own place, and what the second one won there."""
    if isinstance(as_first, CallFailed) or isinstance(as_second, CallFailed):
        reason = next(str(result) for result in (as_first, as_second) if isinstance(result, CallFailed))
        return Preference(first=math.nan, is_consistent=False, reason=reason)
    return preference(as_first, 1 - as_second)


def preference(as_a: float, as_b: float) -> Preference:
    """The preference for the first answer, from what it won when it was shown first (A) and second (B).

    >>> preference(1.0, 0.0)
    Preference(first=0.5, is_consistent=False, reason='')
    """
    return Preference(first=as_a if as_a == as_b else 0.5, is_consistent=as_a == as_b)


def _content(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError("expected choices[0].message.content as in the OpenAI API")
    return content


def _grade(reply: Any, *, settings: JudgeSource, fence: str) -> float:
    return read_score(_content(reply), fence=fence, lowest=settings.lowest, highest=settings.highest)


def _better(reply: Any, *, fence: str) -> float:
    """1 where the reply prefers answer A, 0 where it prefers B, 0.5 at a tie."""
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[read_winner(_content(reply), fence=fence)]


def _client(settings: JudgeSource) -> Client:
    place = urlsplit(settings.url)
    return Client(
        Endpoint(
            url=place._replace(path=place.path.rstrip("/") + "/chat/completions").geturl(),
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            backoff_s=settings.backoff_s,
            workers=settings.workers,
            key=key_from(settings.key_variable, kind="judge"),
        )
    )


def _body(settings: JudgeSource, text: str) -> bytes:
    request = {
        "model": settings.model,
        "messages": [{"role": "user", "content": text}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }
    return json.dumps(request).encode()


def _shown(answer: Answer) -> list[str]:
    """The texts of an answer's prompt that a judge is shown."""
    return [*(part for message in answer.prompt for part in message), answer.solution or ""]


def _template_variables(answer: Answer, settings: JudgeSource, fence: str) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "answer": answer.text,
        "solution": answer.solution,
        "extra": answer.extra,
        "lowest": f"{settings.lowest:g}",
        "highest": f"{settings.highest:g}",
        "fence": fence,
    }


def _checked(rubric: str) -> str:
    """The rubric, once it parses and shows the answer: a typo in it would otherwise cost every row its score."""
    try:
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(rubric))
    except TemplateSyntaxError as error:
        raise ConfigError(f"judge.rubric: line {error.lineno}: {error.message}") from error
    for name in sorted(used - set(_VARIABLES)):
        known, hint = ", ".join(_VARIABLES), did_you_mean(name, _VARIABLES)
        raise ConfigError(f"judge.rubric: '{name}' is not known here{hint}; it may use {known}")
    if "answer" not in used:
        raise ConfigError("judge.rubric: it never shows the answer; put {{ answer }} where the answer belongs")
    if not re.search(r"\{\{\s*fence\s*\}\}.*\banswer\b.*\{\{\s*fence\s*\}\}", rubric, re.DOTALL):
        raise ConfigError(
            "judge.rubric: the answer stands in no fence, so that it could pass for your instructions; put a line with "
            "{{ fence }} before and after {{ answer }}, and after what else is not yours (docs/rewards.md)"
        )
    return rubric


def _rng(context: RewardContext, index: int) -> Random:
    return Random(seed_for(context.seed, "reward/judge", index))
