"""Several models and the same prompts: read, made to fit all of them, and answered with the same luck."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kedge.core.seeds import seed_for
from kedge.core.stage import TooLong
from kedge.data.examples import Prompt
from kedge.data.long_prompts import fit_prompts
from kedge.data.reading import read
from kedge.models.loading.load import DTypeName
from kedge.models.settings import AutoSize
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.answering import Answered, Answering, answer
from kedge.stages.rl.prompts import prompt_limit, report_long_prompts
from kedge.stages.shared.context import Context
from kedge.stages.shared.tokenizer import tokenizer_for

_QUIET_S = 30.0


class FittingSettings(Protocol):
    """Settings of a stage in which a model answers prompts."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def max_prompt_tokens(self) -> int | None: ...
    @property
    def too_long(self) -> TooLong: ...


class AskingSettings(FittingSettings, Protocol):
    """Settings of a stage in which several models answer."""

    @property
    def answers(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def rows(self) -> AutoSize: ...
    @property
    def dtype(self) -> DTypeName: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model, and its answers."""

    name: str
    request: Answering
    answered: Answered


def read_prompts_once(context: Context, *, code: str) -> list[Prompt]:
    """The prompts of the stage; broken lines are set aside and told as an event of this code."""
    set_aside = context.set_aside("prompts.broken.jsonl")
    reading = read(context.input("prompts"), kind="prompts", set_aside=set_aside)
    prompts = [cast(Prompt, example) for example in reading]
    if reading.num_broken:
        context.event("warning", code, f"{reading.num_broken:,} broken lines are set aside in {set_aside}")
    return prompts


def fitting_prompts(
    context: Context, settings: FittingSettings, prompts: list[Prompt], models: Sequence[str] | None = None
) -> list[Prompt]:
    """The prompts that every model can read beside an answer; what happens to others is said by `too_long`. The models
    are those of the field `models` unless others are given."""
    source = context.input("prompts")
    for model in dict.fromkeys(context.inputs("models") if models is None else models):
        longest, limit_name = prompt_limit(model, settings.max_prompt_tokens, settings.max_new_tokens)
        fitted = fit_prompts(
            tokenizer_for(model, context.chat_template),
            prompts,
            source=source,
            max_tokens=longest,
            too_long=settings.too_long,
            limit_name=limit_name,
        )
        report_long_prompts(context, settings.too_long, fitted.long)
        prompts = fitted.prompts
    return prompts


def candidate_answers(
    context: Context,
    settings: AskingSettings,
    prompts: Sequence[Prompt],
    *,
    name: str,
    model: str,
    seed: int | None = None,
) -> Candidate:
    """The answers of one model to all prompts; `seed` is that of the stage unless given."""
    request = Answering(
        model=model,
        sampling=SamplingSettings(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=settings.max_new_tokens,
        ),
        answers=settings.answers,
        # One seed for all models: they draw with the same luck, and what differs is the model.
        seed=seed_for(context.seed if seed is None else seed, "answers"),
        chat_template=context.chat_template,
        device=context.device,
        dtype=settings.dtype,
        rows=settings.rows,
    )
    progress = _Progress(context, name, len(prompts) * settings.answers)
    texts = [prompt.prompt for prompt in prompts]
    answered = answer(request, texts, progress=progress.show, world=context.world)
    where = ", read from the cache" if answered.is_cached else ""
    context.say(f"  {name}: {len(answered.rollouts.tokens_BT):,} answers{where}")
    return Candidate(name=name, request=request, answered=answered)


class _Progress:
    """A line on the screen about the answers of one model, but not more often than every `_QUIET_S`."""

    def __init__(self, context: Context, name: str, total: int) -> None:
        self._context, self._name, self._total = context, name, total
        self._since = time.monotonic()

    def show(self, done: int) -> None:
        if time.monotonic() - self._since >= _QUIET_S:
            self._since = time.monotonic()
            self._context.say(f"  {self._name}: {done:,} of {self._total:,} answers")
