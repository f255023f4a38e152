"""Stage `label`: tasks in, what people say of them out; the run waits until they have said it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from kedge.core.errors import ConfigError
from kedge.core.findings import Finding
from kedge.core.settings import PathText, Section
from kedge.core.stage import Input, MayChange, Stage
from kedge.core.suggest import did_you_mean
from kedge.feedback.steps import Margins
from kedge.label.questions import parse_questions
from kedge.label.settle import SettleKind
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


def _by_people(value: Any) -> Any:
    kind = cast("Mapping[str, Any]", value).get("kind", "people") if isinstance(value, Mapping) else value
    if kind == "judge":
        raise ValueError(
            "by: judge is not there yet: labels are made by people (kind: people); a judge can compare models in a "
            "stage `evaluate`"
        )
    if isinstance(kind, str) and kind not in _WAYS:
        raise ValueError(f"by: there is no {kind!r}{did_you_mean(kind, _WAYS)}; who labels: people")
    if isinstance(value, str):
        raise ValueError("by: people work in a project; write {kind: people, project: NAME}")
    return value


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
    """Ask people about tasks, and wait until they have answered."""

    kind: Literal["label"]
    data: Annotated[str, Input("tasks")]
    """What is asked: a stage `tasks`, or its file."""
    by: Annotated[People, BeforeValidator(_by_people)]
    """Who labels."""
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


def explain(settings: LabelSettings) -> list[str]:
    by, need = settings.by, settings.need
    lines = [
        f"people of project {by.project}: {by.mean_labels():.2f} labels a task on average "
        f"({by.wanted}, and {max(by.wanted, by.overlap.wanted)} of {by.overlap.share:.0%})",
        f"settled by {settings.settle}; the run waits for them with exit code 4, and --resume goes on",
    ]
    needs = [f"α of at least {need.alpha}"] if need.alpha is not None else []
    needs += [f"{need.labels:,} labels"] if need.labels is not None else []
    return [*lines, *([f"stops with exit code 3 below {' or '.join(needs)}"] if needs else [])]


def check(settings: LabelSettings) -> Iterator[Finding]:
    if settings.need.alpha is not None and not (settings.by.wanted > 1 or settings.by.overlap.share > 0):
        yield Finding(
            level="fatal",
            code="label.need",
            message="need.alpha asks for agreement, and no task is labelled by two people",
            where="need.alpha",
            fix="by.overlap: {share: 0.2, wanted: 3}, or leave need.alpha out",
        )


STAGE = Stage(
    summary="What people say of tasks: pairs, rankings, thumbs, demonstrations.",
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
