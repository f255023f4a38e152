"""Stage `label`: tasks in, what people or judges say of them out. The run waits for people, and pays for judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from kedge.core.errors import ConfigError
from kedge.core.findings import Finding
from kedge.core.settings import PathText, Section
from kedge.core.stage import Input, MayChange, Stage
from kedge.core.suggest import did_you_mean
from kedge.feedback.steps import Margins
from kedge.label.questions import parse_questions
from kedge.label.settle import SettleKind
from kedge.rewards.settings import Budget, PairwiseJudge
from kedge.stages.shared.people import PeopleProject

_WAYS = ("people", "judge")


class Overlap(Section):
    """Items that several people label, so that agreement can be measured."""

    share: float = Field(default=0.2, ge=0, le=1)
    """Of the tasks."""
    wanted: int = Field(default=3, ge=1)
    """Labels of each of them."""


class People(PeopleProject):
    """People, in a project of `kedge label`."""

    kind: Literal["people"] = "people"
    wanted: int = Field(default=1, ge=1)
    """Labels a task."""
    overlap: Overlap = Overlap()
    gold: PathText | None = None
    """A file of tasks or pairs whose verdicts are right, by which people are tested."""
    guideline: PathText | None = None
    """What people are to look at; with it the project is made where it is not there yet."""

    def mean_labels(self) -> float:
        """Labels a task, on average.

        >>> round(People(project="shop").mean_labels(), 2)
        1.4
        """
        more = max(self.overlap.wanted, self.wanted)
        return self.overlap.share * more + (1 - self.overlap.share) * self.wanted


class Need(Section):
    """What the labels must reach, else the run stops with exit code 3."""

    alpha: float | None = Field(default=None, ge=-1, le=1)
    """Krippendorff's α of what was asked."""
    labels: int | None = Field(default=None, ge=1)
    """Labels in all."""


class WithoutTrust(Section):
    """A judge that was not measured beside people, and why it labels all the same."""

    without: str
    """The reason; it stays in the manifest, in agreement.json and in the report."""

    @field_validator("without")
    @classmethod
    def _says_something(cls, reason: str) -> str:
        if not reason.strip():
            raise ValueError("say why the judge may label without a trust report")
        return reason.strip()


class Judge(PairwiseJudge):
    """A language model that labels: it compares two answers, always in both orders."""

    constitution: PathText | None = None
    """A file of principles, of which one is drawn for every comparison."""
    orders: Literal["both"] = "both"
    """Every comparison is asked in both orders; where they disagree it is a tie."""
    votes: int = Field(default=1, ge=1, le=64)
    """How often each order is asked; more than once needs a temperature."""
    clamp: bool | None = None
    """Keep probabilities between 0.4 and 0.6, as Constitutional AI does; where absent, as `cot` is."""
    trust: PathText | WithoutTrust
    """What `kedge judge trust` wrote about this judge, or `{without: "reason"}`."""
    max_failed: Annotated[float, MayChange()] = Field(default=0.02, ge=0, le=1)
    """The share of comparisons that may go without a reply; they are left out."""

    @model_validator(mode="after")
    def _votes_differ(self) -> Judge:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes: {self.votes} replies at temperature 0 are all the same; write temperature: 0.7")
        return self

    @property
    def is_clamped(self) -> bool:
        return self.cot if self.clamp is None else self.clamp


def _labeller(value: Any) -> Any:
    if isinstance(value, list):
        kinds = {_kind_named(entry) for entry in cast("list[Any]", value)}
        if "people" in kinds and len(kinds) > 1:
            raise ValueError(
                "by: people and judges do not label in one stage; make two stages `label`, and name both where they "
                "are read (data: [label, ai])"
            )
        if kinds == {"people"}:
            raise ValueError("by: a list is a panel of judges; people work in one project")
        return [_labeller(entry) for entry in cast("list[Any]", value)]
    kind = _kind_named(value)
    if isinstance(kind, str) and kind not in _WAYS:
        raise ValueError(f"by: there is no {kind!r}{did_you_mean(kind, _WAYS)}; who labels: people, or a judge")
    if value == "judge":
        raise ValueError("by: a judge is behind an address; write {kind: judge, url: …, model: …, trust: trust.json}")
    if isinstance(value, str):
        raise ValueError("by: people work in a project; write {kind: people, project: NAME}")
    if isinstance(value, Mapping) and kind == "judge" and "trust" not in value:
        raise ValueError(
            "by: a judge labels once it has earned trust: `kedge judge trust` measures it beside people and writes "
            'trust.json, which `trust:` names; or trust: {without: "reason"}, which stays in the run for ever'
        )
    return {**value, "kind": kind} if isinstance(value, Mapping) else value


def _kind_named(value: Any) -> Any:
    return cast("Mapping[str, Any]", value).get("kind", "people") if isinstance(value, Mapping) else value


def _kind_of(value: Any) -> Any:
    """`settle: {kind: majority}` is `settle: majority`."""
    return cast("Mapping[str, Any]", value)["kind"] if isinstance(value, Mapping) and set(value) == {"kind"} else value


def _known_questions(value: list[str] | dict[str, Any]) -> list[str] | dict[str, Any]:
    try:
        parse_questions(value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("--")) from error
    return value


class LabelSettings(Section):
    """Ask people or judges about tasks."""

    kind: Literal["label"]
    data: Annotated[str, Input("tasks")]
    """What is asked: a stage `tasks`, or its file."""
    by: Annotated[
        Annotated[People | Judge, Field(discriminator="kind")] | Annotated[list[Judge], Field(min_length=1)],
        BeforeValidator(_labeller),
    ]
    """Who labels: people of a project, or a judge; a list of judges is a panel."""
    questions: Annotated[list[str] | dict[str, Any], AfterValidator(_known_questions)] = Field(
        default_factory=lambda: ["pair"], min_length=1
    )
    """What is asked, where the project is made here (one that is there asks what it asks): pair, rank, thumb, write,
    axes, edit, by name or with settings: {pair: {ties: false, both_bad: true}, axes: [helpful, brief]}."""
    settle: Annotated[SettleKind, BeforeValidator(_kind_of)] = "dawid_skene"
    """How several labels become one: by majority, by votes that weigh by gold, or by Dawid and Skene's posterior."""
    ties: Literal["drop", "half"] = "drop"
    """Of pairs: ties are left out, or have certainty ½. Rankings have them always."""
    margins: Margins = "small"
    """Of steps 3, 2, 1: thirds up to 1, or 3, 2, 1."""
    enough: Annotated[float, MayChange()] = Field(default=1.0, gt=0, le=1)
    """The share of the wanted labels from which on the run goes on."""
    need: Need = Need()
    """What the labels must reach."""
    beside: Annotated[str | None, Input("pairs")] = None
    """Pairs that people labelled of the same tasks (a stage `label` of theirs, whose `enough` may be a small share): κ
    of the judges beside them, round by round where there are rounds. People's ties count with their `ties: half`."""
    budget: Annotated[Budget | None, MayChange()] = None
    """What all judges together may cost: `{usd: 40, input: 0.15, output: 0.6}`. The prices are those of judges without
    a `budget` of their own; one that has it keeps its own prices and its own ceiling besides."""

    @property
    def people(self) -> People | None:
        return self.by if isinstance(self.by, People) else None

    @property
    def judges(self) -> tuple[Judge, ...]:
        """Who labels, with the prices of the stage's budget where they have none of their own."""
        judges = self.by if isinstance(self.by, list) else [] if isinstance(self.by, People) else [self.by]
        return tuple(judge if judge.budget else judge.model_copy(update={"budget": self.budget}) for judge in judges)


def explain(settings: LabelSettings) -> list[str]:
    by, need = settings.people, settings.need
    lines: list[str] = []
    if by is not None:
        lines = [
            f"people of project {by.project}: {by.mean_labels():.2f} labels a task on average "
            f"({by.wanted}, and {max(by.wanted, by.overlap.wanted)} of {by.overlap.share:.0%})",
            f"settled by {settings.settle}; the run waits for them with exit code 4, and --resume goes on",
        ]
    for judge in settings.judges:
        own_budget = judge.budget if judge.budget != settings.budget else None
        lines.append(
            f"judge {judge.label}: {2 * judge.votes} calls a comparison, both orders"
            + (f" × {judge.votes} votes" if judge.votes > 1 else "")
            + (f", at most {own_budget.usd:g} USD (exit code 3)" if own_budget else "")
            + (f"; without trust: {judge.trust.without}" if isinstance(judge.trust, WithoutTrust) else "")
        )
    if len(settings.judges) > 1:
        lines.append(f"a panel of {len(settings.judges)}, settled by {settings.settle}")
    if settings.budget:
        lines.append(f"all judges together at most {settings.budget.usd:g} USD (exit code 3)")
    needs = [f"α of at least {need.alpha}"] if need.alpha is not None else []
    needs += [f"{need.labels:,} labels"] if need.labels is not None else []
    return [*lines, *([f"stops with exit code 3 below {' or '.join(needs)}"] if needs else [])]


def check(settings: LabelSettings) -> Iterator[Finding]:
    by = settings.people
    is_alone = len(settings.judges) == 1 if by is None else not (by.wanted > 1 or by.overlap.share > 0)
    if settings.need.alpha is not None and is_alone:
        fix = "by.overlap: {share: 0.2, wanted: 3}" if by else "a list of judges"
        yield _fatal(
            "need.alpha",
            f"need.alpha asks for agreement, and no task is labelled by two {'people' if by else 'judges'}",
            f"{fix}, or leave need.alpha out",
        )
    for name in ("budget", "beside"):
        if getattr(settings, name) is not None and by is not None:
            yield _fatal(name, f"{name} is for judges, and people label here", "leave it out")
    if settings.judges:
        yield from _check_judges(settings)


def _check_judges(settings: LabelSettings) -> Iterator[Finding]:
    names = [judge.label for judge in settings.judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield _fatal("by", f"{', '.join(twice)}: judges are told apart by these names", "give each a name")
    if settings.settle == "weighted":
        yield _fatal(
            "settle", "settle: weighted weighs people by gold questions, which judges are not asked", "dawid_skene"
        )
    changed = [name for name in ("questions", "enough") if name in settings.model_fields_set]
    for name in changed:
        yield _fatal(name, f"{name} is for people: a judge compares answers, and answers at once", "leave it out")


def _fatal(where: str, message: str, fix: str) -> Finding:
    return Finding(
        level="fatal",
        code="label.need" if where == "need.alpha" else "label.judge",
        message=message,
        where=where,
        fix=fix,
    )


STAGE = Stage(
    summary="What people or judges say of tasks: pairs, rankings, thumbs, demonstrations.",
    settings=LabelSettings,
    makes={
        "pairs": "pairs",
        "rankings": "rankings",
        "thumbs": "thumbs",
        "demonstrations": "demonstrations",
        "heldout": "pairs",
    },
    explain=explain,
    check=check,
    run="kedge.stages.label.run:run",
)
