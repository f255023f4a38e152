"""Settings of the looks that an RL run takes at its policy while it trains: exams, and a judge. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from kedge.core.errors import ConfigError, KedgeError
from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, ReadData
from kedge.exams.exam import Exam
from kedge.rewards.settings import PairwiseJudge
from kedge.stages.shared.batch_arithmetic import count


class LookSettings(Section):
    """Looks at the policy while it trains, so that what it loses is seen while it is lost."""

    exam: str | Annotated[list[str], Field(min_length=1)] | None = "quick"
    """Exams that the policy takes (`kedge exam list`): a name, a set, a YAML file of your own, or a list of them; null
    is none."""
    every: int = Field(default=50, ge=1)
    """Iterations between two looks; there is one before the first and one after the last."""
    limit: int | None = Field(default=None, ge=1)
    """Take so many items of each exam, at even distances; all, when absent."""
    judge: PairwiseJudge | None = None
    """A language model that compares answers of the policy with those that it gave at the start, in both orders."""
    prompts: Annotated[ReadData | None, Input("prompts")] = None
    """Prompts for the judge, the same at every look; better none that are trained on."""
    answers: int = Field(default=1, ge=1)
    """Answers to each of these prompts, sampled as those that are learnt from."""

    @property
    def exams(self) -> list[str]:
        """The names of single exams."""
        from kedge.exams.catalogue import expanded

        names = [self.exam] if isinstance(self.exam, str) else self.exam
        return expanded(names) if names else []


def look_steps(settings: LookSettings, iterations: int) -> list[int]:
    """The steps with a look: 0, every so many, and the last.

    >>> look_steps(LookSettings(every=4), 10)
    [0, 4, 8, 10]
    """
    return sorted({*range(0, iterations + 1, settings.every), iterations})


def open_for_policy(name: str, *, limit: int | None) -> Exam:
    """The exam; one that a policy in training cannot take is an error."""
    from kedge.exams.catalogue import is_engine, open_exam
    from kedge.exams.sitting import cost_of

    if is_engine(name):
        raise ConfigError(
            f"{name} loads a model by itself, and a policy in training is in no folder: take it in a stage of kind exam"
        )
    exam = open_exam(name, limit=limit)
    if cost_of(exam).has_scores:
        raise ConfigError(f"the exam {name} asks for scores of a reward model, and a policy has none")
    return exam


def explain_looks(settings: LookSettings | None, iterations: int) -> list[str]:
    """What the looks cost; nothing where there are none, and what cannot be opened is left to `check_looks`."""
    from kedge.exams.sitting import cost_of

    if settings is None:
        return []
    looks, lines = len(look_steps(settings, iterations)), list[str]()
    try:
        names = settings.exams
        costs = [cost_of(open_for_policy(name, limit=settings.limit)) for name in names if not is_file(name)]
    except KedgeError:
        return []
    own = [name for name in names if is_file(name)]
    if costs:
        items, answers = sum(cost.items for cost in costs), sum(cost.answers for cost in costs)
        lines.append(
            f"{count(looks, 'look')} at the policy, each {count(len(costs), 'exam')} of {count(items, 'item')}: "
            f"{count(sum(cost.choices for cost in costs), 'choice')} compared, {count(answers, 'answer')} of "
            f"{count(sum(cost.tokens for cost in costs), 'token')} at most"
        )
    if own:
        lines.append(f"{count(looks, 'look')} at the policy by {', '.join(own)}")
    if settings.judge is not None:
        calls = 2 * settings.answers
        lines.append(
            f"{settings.judge.label} compares each look but the first with it: {count(calls, 'call')} for each prompt, "
            "both orders"
        )
    return lines


def check_looks(settings: LookSettings | None, kind: str, iterations: int) -> Iterator[Finding]:
    """What is wrong with the looks of a stage of this kind."""
    if settings is None:
        return
    try:
        for name in settings.exams:
            # A file of one's own lies beside the recipe, whose folder is known only when the stage runs.
            if not is_file(name):
                open_for_policy(name, limit=settings.limit)
    except KedgeError as error:
        yield Finding(level="fatal", code=f"{kind}.eval", message=str(error), where="eval.exam")
    if settings.exam is None and settings.judge is None:
        yield Finding(
            level="fatal",
            code=f"{kind}.eval",
            message="eval has neither an exam nor a judge: there is nothing to look at",
            where="eval",
            fix="set eval.exam to quick, or leave eval out",
        )
    if (settings.judge is None) != (settings.prompts is None):
        missing, there = ("prompts", "judge") if settings.prompts is None else ("judge", "prompts")
        yield Finding(
            level="fatal",
            code=f"{kind}.eval",
            message=f"eval.{there} is there and eval.{missing} is not: a judge compares answers to fixed prompts",
            where=f"eval.{missing}",
            fix="give both, or leave both out",
        )
    if settings.every > iterations:
        yield Finding(
            level="info",
            code=f"{kind}.eval_every",
            message=f"eval.every {settings.every} is more than the {count(iterations, 'iteration')}: the policy is "
            "looked at before the first and after the last alone",
            where="eval.every",
        )


def is_file(name: str) -> bool:
    """Whether it is an exam of one's own, which lies beside the recipe."""
    return name.endswith((".yaml", ".yml"))
