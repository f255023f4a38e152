"""A language model as a judge, behind any OpenAI-compatible endpoint, that grades answers one by one.

How it is asked and how its reply is read: `judge_protocol`; what it costs: `paid`; comparisons of two answers:
`pairwise`. A reply without a grade is asked for once more at a temperature, where it may be another one, and counted
as unreadable at 0, where it would be the same. Left out: several votes, batching APIs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.core.files import cache_root, hash_bytes
from kedge.core.suggest import did_you_mean
from kedge.rewards.client import Call, CallFailed, Unreadable
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, Source, unscored
from kedge.rewards.judge_protocol import (
    RUBRIC,
    TOP_LOGPROBS,
    chat_body,
    content_of,
    expected_score,
    fence_of,
    read_score,
)
from kedge.rewards.paid import PaidCalls
from kedge.rewards.settings import JudgeSource

_VARIABLES = ("prompt", "answer", "solution", "extra", "lowest", "highest", "fence")
_WITHOUT = "{model} replies, at least at times, without log-probabilities of grades: then the number in it is the grade"
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def make(settings: JudgeSource, context: RewardContext) -> Source:
    calls = _paid_calls(settings, context)
    rubric = read_rubric(settings.rubric or RUBRIC, variables=_VARIABLES, shows=("answer",))
    more = {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if settings.logprobs else {}
    tell_once = cache(partial(context.note, "judge.logprobs", _WITHOUT.format(model=settings.model)))

    def judge(answers: Sequence[Answer]) -> list[ScoreResult]:
        results: dict[int, ScoreResult] = {}
        requests: dict[int, Call[float]] = {}
        without_logprobs: list[str] = []
        for row, answer in enumerate(answers):
            fence = fence_of(context.seed, [*_shown(answer), answer.text])
            try:
                text = rubric.render(_template_variables(answer, settings, fence))
            except Exception as error:  # a template can fail in any way, for a row whose record lacks something
                results[row] = unscored(f"judge.rubric: {type(error).__name__}: {error}")
                continue
            grade = partial(_grade, settings=settings, fence=fence, without=without_logprobs.append)
            # Two equal answers at a temperature may have two grades; at 0 they are asked about once.
            sample = row if settings.temperature else 0
            body = chat_body(settings, text, **more)
            requests[row] = Call(body=body, read=_read_grade, keep=grade, sample=sample)
        results |= _ask(calls, requests, asks_again=settings.temperature > 0)
        if without_logprobs:  # told here, because replies are read in another thread
            tell_once()
        return [results[row] for row in range(len(answers))]

    return Source(judge)


def _ask(calls: PaidCalls, requests: Mapping[int, Call[float]], *, asks_again: bool) -> dict[int, ScoreResult]:
    """The grades by row. With `asks_again` a reply without one gets a second chance, as a sample that is no row's."""
    replies = dict(zip(requests, calls.ask(list(requests.values())), strict=True))
    unreadable = [row for row, reply in replies.items() if isinstance(reply, Unreadable)]
    if asks_again and unreadable:
        again = [replace(requests[row], sample=-1 - row) for row in unreadable]
        replies |= zip(unreadable, calls.ask(again), strict=True)
    return {
        row: unscored(str(reply)) if isinstance(reply, CallFailed) else ScoreResult(reply)
        for row, reply in replies.items()
    }


def _paid_calls(settings: JudgeSource, context: RewardContext) -> PaidCalls:
    """What this run was replied is kept in it, so that an iteration that is resumed costs nothing; at temperature 0 a
    grade is kept for other runs too."""
    budget = settings.budget and settings.budget.model_copy(update={"usd": settings.budget.usd * context.share})
    deciding = settings.model_dump_json(include={"url", "model", "rubric", "temperature", "max_tokens", "logprobs"})
    return PaidCalls(
        settings,
        cache_root() / "judge" if context.calls and not settings.temperature else None,
        budget=budget,
        rate=settings.rate,
        seed=context.seed,
        ledger=context.calls and context.calls / f"{hash_bytes(deciding.encode())[:16]}.jsonl",
        note=context.note,
    )


def _read_grade(kept: float | Mapping[str, str]) -> float:
    """The grade that was kept of a reply; a ValueError with the reason where it has none."""
    if isinstance(kept, Mapping):
        raise ValueError(kept["unreadable"])
    return kept


def _grade(reply: Any, *, settings: JudgeSource, fence: str, without: Callable[[str], None]) -> float | dict[str, str]:
    """The number in the reply; with log-probabilities, the mean of the grades under them. `without` is given
    replies that have none. Why there is no number is kept too: it was paid for."""
    content = content_of(reply)
    scale = {"lowest": settings.lowest, "highest": settings.highest}
    try:
        score = read_score(content, fence=fence, **scale)
    except (ValueError, RecursionError) as error:
        return {"unreadable": str(error)}
    if not settings.logprobs:
        return score
    try:
        expected = expected_score(content, reply["choices"][0]["logprobs"]["content"], fence=fence, **scale)
    except (KeyError, IndexError, TypeError):
        expected = None
    if expected is None:
        without(content)
    return score if expected is None else expected


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


def read_rubric(rubric: str, *, variables: Sequence[str], shows: Sequence[str], uses: Sequence[str] = ()) -> Template:
    """The template, once it parses and shows what is judged: a typo in it would otherwise cost every verdict."""
    try:
        used = meta.find_undeclared_variables(_ENVIRONMENT.parse(rubric))
    except TemplateSyntaxError as error:
        raise ConfigError(f"judge.rubric: line {error.lineno}: {error.message}") from error
    for name in sorted(used - set(variables)):
        known, hint = ", ".join(variables), did_you_mean(name, variables)
        raise ConfigError(f"judge.rubric: '{name}' is not known here{hint}; it may use {known}")
    for name in uses:
        if name not in used:
            raise ConfigError(f"judge.rubric: it never says the {name}; put {{{{ {name} }}}} where it belongs")
    for name in shows:
        if name not in used:
            words = "the answer" if name == "answer" else f"the {name} answer"
            raise ConfigError(f"judge.rubric: it never shows {words}; put {{{{ {name} }}}} where the answer belongs")
        if not re.search(rf"\{{\{{\s*fence\s*\}}\}}.*\b{name}\b.*\{{\{{\s*fence\s*\}}\}}", rubric, re.DOTALL):
            raise ConfigError(
                "judge.rubric: the answer stands in no fence, so that it could pass for your instructions; put a line "
                f"with {{{{ fence }}}} before and after {{{{ {name} }}}}, and after what else is not yours "
                "(docs/rewards.md)"
            )
    return _ENVIRONMENT.from_string(rubric)
