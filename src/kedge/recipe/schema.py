"""The recipe: one page for a whole pipeline. Loading, checking of every key, and the schema for editors.

The settings of a stage belong to the stage, which comes through the plugin door: this file knows none by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field, ValidationError

from kedge.core import plugins
from kedge.core.errors import ConfigError, PluginError
from kedge.core.quoting import quoted
from kedge.core.settings import PathText, Section
from kedge.core.stage import MayChange, Stage
from kedge.core.suggest import did_you_mean
from kedge.core.yaml import problems
from kedge.core.yaml.limits import Unreadable, check_values
from kedge.core.yaml.sections import problems_of
from kedge.core.yaml.source import KeyPath, Place, Tree
from kedge.monitor.alerts import AlertSettings
from kedge.recipe.layers import Overrides, layers_of, load_layers
from kedge.recipe.placement import PlacementSettings
from kedge.recipe.round_settings import RoundsSettings

SectionT = TypeVar("SectionT", bound=Section)

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
LONGEST_NAME = 100
"""Characters of a name: folders are called so, and files inside of them get longer names."""
MAX_STAGES = 500
RESERVED_NAMES = frozenset(
    (
        "inputs",
        "checkpoints",
        "model",
        "con",
        "prn",
        "aux",
        "nul",
        *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
    )
)
"""Folders of a run that are no stage's, and names that not every system can give a folder."""


class RecipeSettings(Section):
    """The top of a recipe."""

    kedge: Literal[1]
    """Version of the recipe format."""
    name: str = Field(pattern=NAME_PATTERN, max_length=LONGEST_NAME)
    """Names the run: its folder is runs/NAME."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """All randomness of the run comes from this number."""
    model: PathText = Field(min_length=1)
    """The model that stages start from: an alias (`kedge models`), a folder, or a hub id."""
    chat_template: PathText | None = None
    """How messages become text: `chatml`, `plain`, or a Jinja file; the model's own template when absent."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU where there is one."""
    trackers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Where metrics go besides the run's own files: tensorboard, wandb, mlflow, with their settings."""
    alerts: Annotated[AlertSettings | None, MayChange()] = None
    """Who is told of events while a run goes on: webhooks and commands."""
    placement: Annotated[PlacementSettings, MayChange()] = PlacementSettings()
    """The processes that compute the run; never changes a result."""
    rounds: RoundsSettings | None = None
    """The whole recipe again and again, each round from what the one before has made (docs/rounds.md)."""
    stages: dict[str, dict[str, Any]] = Field(min_length=1, max_length=MAX_STAGES)
    """The steps, by name. Each says its `kind`; an input may name another stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a stage has made in an earlier round, or will have made for those that follow."""

    stage: str
    folder: str
    """From the folder of the round that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlace:
    """Which round a recipe is, and what it finds there already."""

    number: int
    first_seed: int
    """The seed of round 1."""
    previous: str | None
    """The hash of the manifest of the round before."""
    made: Mapping[str, Made]
    """By the name that an input may have: `previous.ppo`, `round-1.label`, and `sft` for a stage that is done once."""
    kept: Mapping[str, tuple[tuple[str, float], ...]]
    """By stage whose `data` are labels, the earlier rounds whose labels are added, and what they weigh."""
    held_out: Mapping[str, tuple[str, ...]]
    """By the same stages, the held-out labels of earlier rounds, whose prompts nobody is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe whose every key has been checked. `tree` remembers where each was written."""

    file: Path
    """Its YAML file. For one that a script made, what messages call it, in the folder where relative paths start."""
    settings: RecipeSettings
    stages: Mapping[str, Section]
    kinds: Mapping[str, Stage]
    tree: Tree
    round: RoundPlace | None = None
    """Where this is one round of a recipe with `rounds`."""

    @property
    def chat_template(self) -> str | None:
        """The name of a template, or the path of a file that stands beside the recipe that names it."""
        asked = self.settings.chat_template
        place = self.tree.place(("chat_template",))
        beside = (place.file or self.file).parent / asked if asked else None
        return str(beside) if beside and beside.is_file() else asked

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, as JSON: the same values rerun the run. A round's are its own."""
        left_out = {"stages"} if self.settings.rounds else {"stages", "rounds"}
        top = self.settings.model_dump(mode="json", by_alias=True, exclude=left_out)
        elsewhere = self.round.made if self.round else {}
        stages = {
            name: stage.model_dump(mode="json", by_alias=True)
            for name, stage in self.stages.items()
            if name not in elsewhere
        }
        return {**top, "stages": stages}


Problems = list[tuple[int, str]]
"""Lines of a file, and what is wrong there."""


def load_recipe(file: Path, overrides: Overrides = ()) -> Recipe:
    """Read, merge and check a recipe; all problems are reported at once."""
    return _checked(load_layers(file, overrides), file, [])


def recipe_of(
    values: Mapping[str, Any],
    overrides: Overrides = (),
    *,
    label: str = "recipe",
    root: tuple[str, ...] = (),
    noticed: Sequence[str] = (),
) -> Recipe:
    """The same for values that a script holds; relative paths start in the working folder.

    Messages begin with `label` and leave out the keys `root`. `noticed` are problems that the caller has
    found, to be reported with the others.
    """
    file = Path(label)
    try:
        check_values(values)
    except Unreadable as problem:
        raise ConfigError(f"{label}: 1 problem(s)\n  {problem.text}") from None
    # Without a file of its own, a value belongs to the working folder, whatever file it is put over.
    places = dict.fromkeys(_paths_in(values), Place(None, 0))
    tree = layers_of(Tree(dict(values), places, file, root), file, overrides)
    return _checked(tree, file, [(0, problem) for problem in noticed])


def recipe_in(tree: Tree, file: Path) -> Recipe:
    """The recipe that a tree of values is."""
    return _checked(tree, file, [])


def _paths_in(values: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key path of nested mappings."""
    if isinstance(values, Mapping):
        for key, value in cast("Mapping[str, Any]", values).items():
            yield (*path, key)
            yield from _paths_in(value, (*path, key))


def _checked(tree: Tree, file: Path, noted: Problems) -> Recipe:
    settings = _validated(RecipeSettings, tree.values, tree, (), noted)
    stages, kinds = dict[str, Section](), dict[str, Stage]()
    raw_stages: Any = tree.values.get("stages")
    named = cast("dict[str, Any]", raw_stages) if isinstance(raw_stages, dict) else {}
    _check_names(named, tree, noted)
    for name, raw in islice(named.items(), MAX_STAGES):
        stage = _stage_of(name, raw, tree, noted)
        if stage is None:
            continue
        section = _validated(stage.settings, raw, tree, ("stages", name), noted)
        if section is not None:
            stages[name], kinds[name] = section, stage
    _check_trackers(tree, noted)
    if noted or settings is None:
        raise problems_of(file, noted)
    return Recipe(file=file, settings=settings, stages=stages, kinds=kinds, tree=tree)


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe with every stage kind that is installed, for completion and checks in editors."""
    top = RecipeSettings.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = top.pop("$defs", {})
    variants: list[dict[str, Any]] = []
    for kind in plugins.names("stages"):
        stage: Stage = plugins.find("stages", kind)
        schema = stage.settings.model_json_schema(by_alias=True, ref_template=f"#/$defs/{kind}.{{model}}")
        for name, definition in schema.pop("$defs", {}).items():
            definitions[f"{kind}.{name}"] = definition
        schema["description"] = stage.summary
        definitions[f"stage.{kind}"] = schema
        variants.append({"$ref": f"#/$defs/stage.{kind}"})
    top["properties"]["stages"]["additionalProperties"] = {"oneOf": variants}
    top["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Recipes to start from; what stands here goes over them.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "title": "Kedge recipe",
        "$defs": definitions,
    }


def _check_names(stages: Mapping[Any, Any], tree: Tree, noted: Problems) -> None:
    """A stage's name is that of its folder, so it is held to what the run's own name is held to."""
    by_lower: dict[str, str] = {}
    for name in islice(map(str, stages), MAX_STAGES):
        if not re.fullmatch(NAME_PATTERN, name) or len(name) > LONGEST_NAME:
            text = (
                f"a stage's name is that of its folder: letters, digits, - and _, at most {LONGEST_NAME} characters, "
                f"found {quoted(name)}"
            )
        elif name.lower() in RESERVED_NAMES:
            text = f"{quoted(name)} is the name of another folder, or of a device; call the stage otherwise"
        elif name.lower() in by_lower:
            text = f"{by_lower[name.lower()]!r} is a stage already, and some disks do not tell capitals apart"
        else:
            by_lower[name.lower()] = name
            continue
        noted.append(tree.problem(("stages", name), text))


def _stage_of(name: str, raw: Any, tree: Tree, noted: Problems) -> Stage | None:
    """The plugin of one stage, or None with the reason noted."""

    def note(path: tuple[str, ...], text: str) -> None:
        noted.append(tree.problem(path, text))

    here = ("stages", name)
    if not isinstance(raw, dict):
        return note(here, f"must be a mapping of settings, found {quoted(raw)}")
    installed = plugins.names("stages")
    kind = cast("dict[str, Any]", raw).get("kind")
    if kind is None:
        return note((*here, "kind"), f"is required and missing; one of {', '.join(installed)}")
    if kind not in installed:
        listed = ", ".join(installed) or "none"
        return note(
            (*here, "kind"), f"no stage of kind {quoted(kind)}{did_you_mean(str(kind), installed)}; installed: {listed}"
        )
    try:
        return cast(Stage, plugins.find("stages", str(kind)))
    except PluginError as error:
        return note(here, str(error))


def _check_trackers(tree: Tree, noted: Problems) -> None:
    installed = plugins.names("trackers")
    asked: Any = tree.values.get("trackers")
    for name in islice(cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}, MAX_STAGES):
        if name not in installed:
            path = ("trackers", name)
            text = f"no such tracker{did_you_mean(name, installed)}; installed: {', '.join(installed)}"
            noted.append(tree.problem(path, text))


def _validated(
    section: type[SectionT], values: Any, tree: Tree, prefix: tuple[str, ...], noted: Problems
) -> SectionT | None:
    try:
        return section.model_validate(values)
    except ValidationError as error:
        noted.extend(problems.lines(error, section, tree, prefix))
        return None
