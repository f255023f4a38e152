"""Stage `tasks`: answers of models, and which of them people are asked to compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, PromptUse, ReadData, Stage
from kedge.feedback.choice import RANDOM_SHARE
from kedge.stages.shared.answering import AnsweringSettings
from kedge.stages.shared.batch_arithmetic import count

ChooseKind = Literal["d_optimal", "ensemble", "uncertain", "random"]
Ask = Literal["pair", "rank", "thumb", "write"]


class Choose(Section):
    """Which pairs are asked: those that a reward model would learn most from, and a share at random."""

    kind: ChooseKind = "random"
    reward: Annotated[str | None, Input("reward_model")] = None
    """The reward model that doubts; without one, as in a first round, everything is at random."""
    asked: Annotated[ReadData | None, Input("pairs")] = None
    """Pairs that were answered before, for `d_optimal`: what they taught need not be asked again."""
    random: float = Field(default=RANDOM_SHARE, ge=0, le=1)
    """The share that is drawn at random, so that something can be said of all pairs."""


def _from_name(value: Any) -> Any:
    """`choose: random` is `choose: {kind: random}`."""
    return {"kind": value} if isinstance(value, str) else value


class TasksSettings(AnsweringSettings):
    """Draw answers, and choose what people are asked about them."""

    kind: Literal["tasks"]
    models: Annotated[list[str], Input("model")] = Field(default_factory=list[str])
    """Models, or stages that make one; who labels never sees which. None where answers are written (`ask: write`)."""
    prompts: Annotated[ReadData, Input("prompts")]
    """What the models are asked."""
    answers: int = Field(default=2, ge=1)
    """Answers a model gives to each prompt."""
    ask: Ask = "pair"
    """Which of two is better; the order of all; one answer, good or bad; or to write one."""
    number: int | None = Field(default=None, ge=1, alias="count")
    """Tasks in all; one for each prompt, when absent."""
    heldout: float = Field(default=0.1, ge=0, lt=1)
    """The share of the tasks that is held out to measure on: drawn at random, whatever `choose` says."""
    challenge: float = Field(default=0.0, ge=0, lt=1)
    """The share of the tasks that are about prompts of Kedge's own, in which the user insists on something wrong."""
    choose: Annotated[Choose, BeforeValidator(_from_name)] = Choose()
    """Which pairs are asked."""
    round: int = Field(default=0, ge=0)
    """The number of the round, which labels carry; in a recipe with `rounds`, that of the round when absent."""

    @property
    def is_random(self) -> bool:
        return self.choose.kind == "random" or self.choose.reward is None


def explain(settings: TasksSettings) -> list[str]:
    number = "a task for each prompt" if settings.number is None else count(settings.number, "task")
    lines = []
    if settings.models:
        lines.append(f"{count(len(settings.models), 'model')} × {count(settings.answers, 'answer')} to each prompt")
    how = "at random" if settings.is_random else f"{1 - settings.choose.random:.0%} by {settings.choose.kind}"
    parts = [f"{settings.heldout:.0%} held out at random"] if settings.heldout else []
    parts += [f"{settings.challenge:.0%} with a user who insists on something wrong"] if settings.challenge else []
    return [*lines, f"{number} ({settings.ask}), {how}" + "".join(f"; {part}" for part in parts)]


def check(settings: TasksSettings) -> Iterator[Finding]:
    def finding(where: str, message: str, fix: str, level: Literal["fatal", "warning"] = "fatal") -> Finding:
        return Finding(level=level, code=f"tasks.{where}", message=message, where=where, fix=fix)

    twice = sorted({name for name in settings.models if settings.models.count(name) > 1})
    if twice:
        yield finding("models", f"{', '.join(twice)}: named more than once", "name each model once")
    if settings.ask != "write" and not settings.models:
        yield finding("models", f"ask: {settings.ask} needs answers, and there is no model", "name one or more models")
    if settings.ask == "write" and settings.models:
        yield finding("models", "ask: write shows no answer, and models would answer in vain", "leave models out")
    least = {"pair": 2, "rank": 3}.get(settings.ask, 0)
    if settings.models and len(settings.models) * settings.answers < least:
        given = len(settings.models) * settings.answers
        yield finding(
            "answers", f"ask: {settings.ask} needs {least} answers to a prompt, and there are {given}", "raise it"
        )
    if settings.top_k == 1 and settings.ask in ("pair", "rank") and settings.answers > 1:
        yield finding("top_k", "top_k is 1: all answers of a model to a prompt would be the same", "leave top_k out")
    if settings.ask != "pair" and settings.choose.kind != "random":
        yield finding("choose", f"choose: {settings.choose.kind} is for pairs; ask is {settings.ask}", "choose: random")
    if settings.choose.kind != "random" and settings.choose.reward is None:
        message = f"choose: {settings.choose.kind} has no reward model, so that everything is at random"
        yield finding("choose", message, "name a reward stage or folder, or choose: random", "warning")
    if settings.choose.asked is not None and settings.choose.kind != "d_optimal":
        yield finding("choose", "choose.asked is read by d_optimal alone", "leave it out, or choose d_optimal")
    if settings.heldout + settings.challenge >= 1:
        yield finding("heldout", "heldout and challenge together leave nothing to choose", "lower one of them")


def prompt_use(settings: TasksSettings) -> PromptUse | None:
    """How the prompts are asked; every model reads the same ones."""
    if not settings.models:
        return None
    return PromptUse(
        field="prompts",
        max_tokens=settings.max_prompt_tokens,
        max_new_tokens=settings.max_new_tokens,
        too_long=settings.too_long,
        rewards={},
        max_unscored=1.0,
    )


STAGE = Stage(
    summary="Answers of models, and which of them people are asked about.",
    settings=TasksSettings,
    makes={"tasks": "tasks"},
    explain=explain,
    check=check,
    prompts=prompt_use,
    run="kedge.stages.tasks.run:run",
)
