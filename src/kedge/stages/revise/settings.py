"""Stage `revise`: a model's answers, criticised and rewritten by principles, as data to learn from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, PromptUse, ReadData, Stage
from kedge.rewards.settings import FailureSettings, JudgeEndpoint, PairwiseJudge
from kedge.stages.shared.answering import AnsweringSettings
from kedge.stages.shared.batch_arithmetic import count


class SafePrompts(Section):
    """Which prompts are safe, so that a refusal is no answer to them."""

    field: str = Field(default="harmless", min_length=1)
    """A field of the prompts' records, true or false. (One called `safe` would be taken for a verdict.)"""
    default: bool = False
    """Whether a prompt whose record has no such field is safe."""


def _from_one_word(value: Any) -> Any:
    """`safe: true` says it of all prompts that do not say it themselves, `safe: FIELD` names the field."""
    if isinstance(value, bool):
        return {"default": value}
    return {"field": value} if isinstance(value, str) else value


class ReviseSettings(AnsweringSettings):
    """Answer, criticise, revise; again and again."""

    kind: Literal["revise"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The model whose answers are revised; the recipe's `model` when absent."""
    by: JudgeEndpoint | None = None
    """Who criticises and revises: a language model behind an endpoint. Without it, the model itself."""
    prompts: Annotated[ReadData, Input("prompts")]
    """What the model is asked."""
    constitution: Annotated[str, Input("rules")]
    """The file of principles (docs/constitution.md)."""
    times: int = Field(default=4, ge=1, le=100)
    """Critiques and revisions of each answer; a principle is drawn for each."""
    safe: Annotated[SafePrompts, BeforeValidator(_from_one_word)] = SafePrompts()
    """Which prompts are safe: `true`, the name of a field, or both as `{field: …, default: …}`."""
    judge: PairwiseJudge | None = None
    """Compares the last revision with the first answer, in both orders; those that it likes less are left out."""
    heldout: float = Field(default=0.0, ge=0, lt=1)
    """The share of the prompts whose pairs are held out to measure on; no demonstration is made of them."""
    failures: FailureSettings = FailureSettings()
    """How many calls of `by` and `judge` may fail."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer; where the model itself criticises, its longest critique and revision too."""


def explain(settings: ReviseSettings) -> list[str]:
    who = f"{settings.by.model} at {settings.by.url}" if settings.by else "the model itself"
    calls = 2 * settings.times
    each = f"{count(calls, 'call')} for each prompt" if settings.by else f"{count(calls, 'generation')} for each prompt"
    lines = [f"{count(settings.times, 'critique')} and as many revisions of each answer by {who}: {each}"]
    if settings.judge:
        lines.append(f"{settings.judge.label} compares the last with the first: 2 calls for each prompt, both orders")
    held_out = [f"the pairs of {settings.heldout:.0%} of the prompts are held out"] if settings.heldout else []
    return [*lines, *held_out]


def check(settings: ReviseSettings) -> Iterator[Finding]:
    judge, by = settings.judge, settings.by
    if judge is not None and by is not None and (judge.url, judge.model) == (by.url, by.model):
        yield Finding(
            level="warning",
            code="revise.judge",
            message=f"{by.model} judges its own revisions, and models prefer what they wrote themselves",
            where="judge.model",
            fix="let another model judge",
        )


def prompt_use(settings: ReviseSettings) -> PromptUse:
    """How the prompts are asked, and the servers that are asked about the answers."""
    servers = {"by": settings.by, "judge": settings.judge}
    return PromptUse(
        field="prompts",
        max_tokens=settings.max_prompt_tokens,
        max_new_tokens=settings.max_new_tokens,
        too_long=settings.too_long,
        rewards={},
        max_unscored=1.0,
        judges={field: server for field, server in servers.items() if server is not None},
    )


STAGE = Stage(
    summary="Answers, criticised and rewritten by the principles of a constitution.",
    settings=ReviseSettings,
    makes={"demonstrations": "demonstrations", "pairs": "pairs", "heldout": "pairs"},
    explain=explain,
    check=check,
    prompts=prompt_use,
    run="kedge.stages.revise.run:run",
)
