"""A stage: one step of a pipeline, as a plugin declares it.

A stage's settings mark the fields that are inputs: `data: Annotated[str, Input("pairs")]`. In a recipe such a field
holds a file, a model, or the name of another stage (`reward`, `prepare.heldout`), and the wiring is checked by kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.plugins import Kind
from kedge.core.settings import Section

ArtifactKind = Literal[
    "model",
    "reward_model",
    "records",
    "demonstrations",
    "pairs",
    "rankings",
    "thumbs",
    "prompts",
    "evaluation",
    "tasks",
    "rules",
    "verdict",
]
"""What flows between stages. `records` is a data file of any kind; what it holds is checked when it is read. `tasks`
are what people are asked, `rules` is the file that a gate decides by, or a constitution."""


class DataFile(Section):
    """A file of data, and how it is read."""

    file: str
    """A file, a folder, a dataset of the hub, or another stage."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict[str, str | list[str]])
    """Which column plays which part: `{prompt: question, chosen: good, ignore: [score]}` (docs/data.md)."""
    limit: int | None = Field(default=None, ge=1)
    """Read at most so many rows, from the first on."""


class WeightedFile(DataFile):
    """A file of data in a list of files."""

    weight: float | None = Field(default=None, gt=0)
    """Its share beside the other weights of the list; without any, every example counts once."""


ReadData = str | DataFile | Annotated[list[str | DataFile], Field(min_length=1)]
"""What is read as it is: one file or several."""
MixedData = str | WeightedFile | Annotated[list[str | WeightedFile], Field(min_length=1)]
"""What is trained on: one file, or several with the shares that they have in it."""

TooLong = Literal["refuse", "drop", "cut"]
"""What happens to a prompt with more tokens than a stage allows: the stage does not start; it is left out and counted;
or it loses its beginning (of a conversation the oldest turns first)."""

DATA_KINDS: frozenset[str] = frozenset({"records", "demonstrations", "pairs", "rankings", "thumbs", "prompts"})


@dataclass(frozen=True, slots=True)
class Input:
    """Marks a settings field as an input of one of these kinds. A stage that takes `several` files of data reads them
    itself; for others a list of files becomes one file."""

    kinds: tuple[ArtifactKind, ...]
    several: bool

    def __init__(self, *kinds: ArtifactKind, several: bool = False) -> None:
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "several", several)


@dataclass(frozen=True, slots=True)
class PartName:
    """Marks a settings field that holds the name of an installed part of this kind; where `is_code`, it may also hold
    `file.py:function`. Both are inputs: a run is not resumed with other code."""

    kind: Kind
    is_code: bool = False


class MayChange:
    """Marks a settings field that steers a run without changing its results: a resumed run may have another value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUse:
    """How a stage asks prompts, so that it is checked before anything is trained."""

    field: str
    """The input that the prompts come from."""
    max_tokens: int | None
    """Longest prompt; None is what the window of the model leaves beside an answer."""
    max_new_tokens: int
    """Longest answer."""
    too_long: TooLong
    rewards: Mapping[str, Any]
    """The reward sources that read the answers, by their field in the recipe."""
    max_unscored: float
    """The share of answers that may go without a score."""
    judges: Mapping[str, Any] | None = None
    """The judges that compare the answers with other ones, and the models that rewrite them, by their field in the
    recipe."""


RunStage = Callable[[Any, Any], Mapping[str, Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`makes` maps an output's name to its kind; the first one is what the bare stage name stands for.

    The settings have a field `kind` that names the stage. `explain` says their arithmetic in plain words, `check`
    looks for trouble that types cannot express, `window` is the most tokens that an example may have, `inputs` has the
    kinds of those inputs that can have fewer than their marks say, by field, `prompts` says how prompts are asked, for
    stages that sample answers. `run(context, settings)` does the work and
    returns the path of each output (`kedge.stages.shared.context.Context`); it is given as a function, or by its name
    `package.module:function`, so that a recipe is checked without importing torch. A stage without `run` can be checked
    only.
    """

    summary: str
    settings: type[Section]
    makes: Mapping[str, ArtifactKind]
    explain: Callable[[Any], Sequence[str]]
    check: Callable[[Any], Iterable[Finding]] = lambda settings: ()
    window: Callable[[Any], int | None] = lambda settings: None
    inputs: Callable[[Any], Mapping[str, tuple[ArtifactKind, ...]]] = lambda settings: {}
    prompts: Callable[[Any], PromptUse | None] = lambda settings: None
    run: RunStage | str | None = None

    def load_run(self) -> RunStage | None:
        """The function behind `run`, imported now: only a stage that runs needs torch."""
        return resolve_name(self.run) if isinstance(self.run, str) else self.run
