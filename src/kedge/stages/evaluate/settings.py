"""Stage `evaluate`: the answers of several models to the same fixed prompts, scored and compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.stage import Input, MayChange, PromptUse, ReadData, Stage
from kedge.evaluate.judged import MAJORITY
from kedge.label.settle import SettleKind
from kedge.rewards.settings import FailureSettings, PairwiseJudge, RewardSourceSettings
from kedge.stages.shared.answering import AnsweringSettings
from kedge.stages.shared.batch_arithmetic import count
from kedge.stages.shared.people import PeopleProject


class PeopleJudge(PeopleProject):
    """People of a project of `kedge label` say which of two answers is better; the run waits for them."""

    kind: Literal["people"]
    name: str = Field(default="people", min_length=1)
    """What results call them."""
    wanted: int = Field(default=1, ge=1)
    """Labels a comparison."""
    settle: SettleKind = "majority"
    """How several labels become one."""
    enough: Annotated[float, MayChange()] = Field(default=1.0, gt=0, le=1)
    """The share of the comparisons from which on the run goes on; the others are left out of the win rate."""

    @property
    def label(self) -> str:
        return self.name


AnyJudge = Annotated[PairwiseJudge | PeopleJudge, Field(discriminator="kind")]


class EvaluateSettings(AnsweringSettings):
    """Compare models on prompts that none of them was trained on."""

    kind: Literal["evaluate"]
    models: Annotated[list[str], Input("model")] = Field(min_length=1)
    """Models, or stages that make one; the first is the one the others are compared with."""
    prompts: Annotated[ReadData, Input("prompts")]
    """Held-out prompts."""
    reward: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Who scores the answers: a reward stage or folder, or any reward source. Without it they are not scored."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """A second opinion that no training has seen: the truth, where it is known."""
    judge: AnyJudge | Annotated[list[AnyJudge], Field(min_length=1)] | None = None
    """Who compares every answer with the baseline's: a language model, in both orders, or people; a list is a panel."""
    groups: list[str] = Field(default_factory=list[str])
    """Fields of the prompts' records (language, source): the numbers are given for each of their values too."""
    answers: int = Field(default=1, ge=1)
    """Answers a model gives to each prompt."""
    tie: float = Field(default=1e-4, ge=0)
    """Scores that differ by no more than this are equal: rounding is not a preference."""
    failures: FailureSettings = FailureSettings()
    """How many answers may go without a score."""

    @property
    def judges(self) -> tuple[PairwiseJudge | PeopleJudge, ...]:
        return tuple(self.judge) if isinstance(self.judge, list) else (self.judge,) if self.judge else ()

    @property
    def machines(self) -> tuple[PairwiseJudge, ...]:
        """The judges that are language models."""
        return tuple(judge for judge in self.judges if isinstance(judge, PairwiseJudge))

    @property
    def people(self) -> tuple[PeopleJudge, ...]:
        return tuple(judge for judge in self.judges if isinstance(judge, PeopleJudge))


def explain(settings: EvaluateSettings) -> list[str]:
    lines = [f"{count(len(settings.models), 'model')} × {count(settings.answers, 'answer')} to each prompt"]
    if settings.machines:
        calls = 2 * (len(settings.models) - 1) * settings.answers * len(settings.machines)
        lines.append(f"{count(len(settings.machines), 'judge')}: {count(calls, 'call')} for each prompt, both orders")
    for people in settings.people:
        labels = (len(settings.models) - 1) * settings.answers * people.wanted
        lines.append(
            f"people of {people.project}: {count(labels, 'label')} for each prompt; the run waits (exit code 4)"
        )
    if settings.judges:
        return lines
    if settings.reward is None and settings.gold is None:
        lines.append("nobody scores the answers: lengths, repetition and KL alone are compared")
    return lines


def check(settings: EvaluateSettings) -> Iterator[Finding]:
    twice = sorted({name for name in settings.models if settings.models.count(name) > 1})
    if twice:
        yield Finding(
            level="fatal",
            code="evaluate.models",
            message=f"{', '.join(twice)}: named more than once, and results are told apart by these names",
            where="models",
            fix="name each model once",
        )
    yield from _check_judges(settings)
    repeated = sorted({field for field in settings.groups if settings.groups.count(field) > 1})
    if repeated:
        yield Finding(
            level="fatal",
            code="evaluate.groups",
            message=f"{', '.join(repeated)}: named more than once",
            where="groups",
            fix="name each field once",
        )


def _check_judges(settings: EvaluateSettings) -> Iterator[Finding]:
    names = [judge.label for judge in settings.judges]
    wrong = sorted({name for name in names if names.count(name) > 1 or name == MAJORITY})
    if wrong:
        yield Finding(
            level="fatal",
            code="evaluate.judge",
            message=f"{', '.join(wrong)}: results are told apart by the judges' names, and '{MAJORITY}' is all of them",
            where="judge",
            fix="give each judge a name of its own",
        )
    if names and len(settings.models) < 2:
        yield Finding(
            level="fatal",
            code="evaluate.judge",
            message="a judge compares models with the first one, and there is no other",
            where="judge",
            fix="name two models or more, or leave the judge out",
        )


def prompt_use(settings: EvaluateSettings) -> PromptUse:
    """How the prompts are asked; every model reads the same ones."""
    sources = {"reward": settings.reward, "gold": settings.gold}
    return PromptUse(
        field="prompts",
        max_tokens=settings.max_prompt_tokens,
        max_new_tokens=settings.max_new_tokens,
        too_long=settings.too_long,
        rewards={field: source for field, source in sources.items() if source is not None},
        max_unscored=settings.failures.max_share,
        judges={
            f"judge.{place}" if isinstance(settings.judge, list) else "judge": judge
            for place, judge in enumerate(settings.judges)
            if isinstance(judge, PairwiseJudge)
        },
    )


STAGE = Stage(
    summary="Answers of several models to the same prompts, compared.",
    settings=EvaluateSettings,
    makes={"evaluation": "evaluation", "pairs": "pairs"},
    explain=explain,
    check=check,
    prompts=prompt_use,
    run="kedge.stages.evaluate.run:run",
)
