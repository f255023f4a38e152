"""The wiring between stages: which input comes from where, checked by kind before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import ConfigError
from kedge.core.quoting import quoted
from kedge.core.settings import Section, unusable_path
from kedge.core.stage import DATA_KINDS, ArtifactKind, DataFile, Input, WeightedFile
from kedge.core.suggest import did_you_mean
from kedge.core.yaml.source import dotted
from kedge.recipe.schema import Made, Recipe

EARLIER = "heldout.earlier"
"""The field of links to the held-out labels of earlier rounds."""
PREVIOUS = "previous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One value of one input field. `stage` and `output` are empty when the value is a file or a model."""

    field: str
    kinds: tuple[ArtifactKind, ...]
    value: str
    folder: Path
    stage: str = ""
    output: str = ""
    home: str = ""
    """The folder of that stage from the run's own, where another round has made it."""
    weight: float | None = None
    """Of labels of an earlier round that are added to those of the link before: what each of them counts."""
    reading: DataFile | None = None
    """How a file of data is read, where the recipe says more than its name."""
    is_one_of_several: bool = False
    """Whether the stage reads the files of this field one by one."""

    @property
    def is_data(self) -> bool:
        return bool(DATA_KINDS & set(self.kinds))

    def source(self) -> str:
        """A file or model as it can be opened: relative paths are relative to the file they were written in.

        The folder of a stage stands for the model that it made.
        """
        from kedge.data.sources import is_hub_id
        from kedge.models.loading.resolve import model_of_stage

        beside = self.folder / self.value
        is_elsewhere = is_hub_id(self.value) if self.is_data else True
        if is_elsewhere and not beside.exists():
            return self.value
        if {"model", "reward_model"} & set(self.kinds) and beside.is_dir():
            beside = model_of_stage(beside)
        # A folder beside the recipe that is called like a built-in model must not be taken for it.
        return str(beside) if "/" in str(beside) else f"./{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages in an order in which each one's inputs are ready, and the links of each."""

    order: tuple[str, ...]
    links: Mapping[str, tuple[Link, ...]]


def connect(recipe: Recipe) -> Plan:
    """Resolve every input; raise one ConfigError with all that cannot be connected."""
    faults: list[str] = []
    links = {name: tuple(_links_of(name, recipe, faults)) for name in recipe.stages}
    made = recipe.round.made if recipe.round else {}
    graph = {name: {link.stage for link in links[name] if link.stage and not link.home} for name in recipe.stages}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        faults.append(f"stages wait for each other: {' -> '.join(cast('list[str]', error.args[1]))}")
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigError(f"{recipe.file}: the pipeline cannot run:\n{listed}")
    return Plan(order=tuple(name for name in _in_order(graph) if name not in made), links=links)


def inputs_of(settings: Section) -> Iterator[tuple[tuple[str, ...], Input, Any]]:
    """The inputs in settings, also in sections inside of them: the path a recipe uses, the kinds, the value."""
    for name, info in type(settings).model_fields.items():
        value: Any = getattr(settings, name)
        own = info.alias or name
        mark = next((mark for mark in info.metadata if isinstance(mark, Input)), None)
        if mark and DATA_KINDS & set(mark.kinds) and isinstance(value, DataFile):
            yield (own,), mark, value
        elif isinstance(value, Section):
            yield from (((own, *path), inner, link) for path, inner, link in inputs_of(value))
        elif isinstance(value, Mapping):
            for key, part in cast("Mapping[str, Any]", value).items():
                if isinstance(part, Section):
                    yield from (((own, key, *path), inner, link) for path, inner, link in inputs_of(part))
        elif mark:
            yield (own,), mark, value


def _links_of(name: str, recipe: Recipe, faults: list[str]) -> list[Link]:
    links: list[Link] = []
    narrowed = recipe.kinds[name].inputs(recipe.stages[name])
    for where, mark, value in inputs_of(recipe.stages[name]):
        if value is None and "model" in mark.kinds and where == ("from",):
            value = recipe.settings.model
        path = ("stages", name, *where)
        place = recipe.tree.place(path if path in recipe.tree.places else ("model",))
        folder = (place.file or recipe.file).parent
        listed = [] if value is None else [value] if isinstance(value, str | DataFile) else list(value)
        field = ".".join(where)
        _refuse_half_weighted(f"{name}.{field}", listed, faults)
        for entry in cast("list[str | DataFile]", listed):
            file = entry.file if isinstance(entry, DataFile) else entry
            if problem := unusable_path(file):
                faults.append(f"{name}.{dotted(where)}: {problem}")
                continue
            link = _link(name, field, narrowed.get(field, mark.kinds), file, folder, recipe, faults)
            reading = entry if isinstance(entry, DataFile) else None
            links.append(replace(link, reading=reading, is_one_of_several=mark.several))
            links.extend(_of_earlier_rounds(name, links[-1], recipe, faults))
    return links


def _of_earlier_rounds(name: str, link: Link, recipe: Recipe, faults: list[str]) -> list[Link]:
    """The labels of earlier rounds that are added to those of a link, and those that stay held out."""
    if recipe.round is None or not link.stage or link.home:
        return []

    def earlier(number: str, field: str, weight: float | None) -> Link:
        value = f"{number}.{link.value}"
        other = _link(name, field, link.kinds, value, link.folder, recipe, faults)
        return replace(other, weight=weight, reading=link.reading, is_one_of_several=link.is_one_of_several)

    if link.field == "data":
        return [earlier(number, "data", weight) for number, weight in recipe.round.kept.get(name, ())]
    if link.field == "heldout":
        return [earlier(number, EARLIER, None) for number in recipe.round.held_out.get(name, ())]
    return []


def _refuse_half_weighted(where: str, entries: Sequence[Any], faults: list[str]) -> None:
    weighted = [isinstance(entry, WeightedFile) and entry.weight is not None for entry in entries]
    if any(weighted) and not all(weighted):
        faults.append(f"{where}: some of the files have a weight and some have none; give all of them one, or none")


def _link(
    name: str,
    field: str,
    kinds: tuple[ArtifactKind, ...],
    value: str,
    folder: Path,
    recipe: Recipe,
    faults: list[str],
) -> Link:
    made = _made_elsewhere(recipe)
    first, _, rest = value.partition(".")
    head, output = (first, rest) if first in recipe.stages else _split(value)
    stage = made[head].stage if head in made else head
    if problem := _unknown_round(head, recipe, made, is_file=(folder / value).exists()):
        faults.append(f"{name}.{field}: {problem}")
    if stage not in recipe.stages or (
        output and output not in recipe.kinds[stage].makes and (folder / value).is_file()
    ):
        link = Link(field=field, kinds=kinds, value=value, folder=folder)
        if link.is_data and not Path(link.source()).exists() and "/" not in value:
            hint = did_you_mean(head, [other for other in recipe.stages if other != name])
            if hint:
                faults.append(f"{name}.{field}: there is no file {quoted(value)} and no stage of that name{hint}")
        return link
    makes = recipe.kinds[stage].makes
    output = output or next(iter(makes))
    if output not in makes:
        faults.append(
            f"{name}.{field}: {head} makes {', '.join(makes)}, not {quoted(output)}{did_you_mean(output, makes)}"
        )
    elif not _fits(makes[output], kinds):
        faults.append(f"{name}.{field}: needs {' or '.join(kinds)}, but {head}.{output} is {makes[output]}")
    home = made[head].folder if head in made else ""
    return Link(field=field, kinds=kinds, value=value, folder=folder, stage=stage, output=output, home=home)


def _split(value: str) -> tuple[str, str]:
    """The stage that an input names and the output: `previous.ppo` and `round-1.label` are names of stages too.

    >>> _split("prepare.heldout"), _split("previous.ppo"), _split("previous.label.pairs"), _split("ppo")
    (('prepare', 'heldout'), ('previous.ppo', ''), ('previous.label', 'pairs'), ('ppo', ''))
    """
    head, _, output = value.partition(".")
    if head == PREVIOUS or re.fullmatch(r"round-\d+", head):
        stage, _, output = output.partition(".")
        head = f"{head}.{stage}"
    return head, output


def _made_elsewhere(recipe: Recipe) -> Mapping[str, Made]:
    """What other rounds have made; of a recipe that is no round yet, what the one before would have."""
    if recipe.round is not None:
        return recipe.round.made
    if recipe.settings.rounds is None:
        return {}
    return {f"{PREVIOUS}.{stage}": Made(stage=stage, folder=f"../{PREVIOUS}/{stage}") for stage in recipe.stages}


def _unknown_round(head: str, recipe: Recipe, made: Mapping[str, Made], *, is_file: bool) -> str | None:
    """What is wrong with a name that begins with `previous.`; None where nothing is."""
    before, dot, stage = head.partition(".")
    if before != PREVIOUS or not dot or head in made or is_file:
        return None
    if recipe.round is None and recipe.settings.rounds is None:
        if stage not in recipe.stages:
            return None
        return f"{quoted(head)} is what the round before has made, and the recipe has no `rounds` (docs/rounds.md)"
    hint = did_you_mean(stage, recipe.stages)
    return f"{quoted(head)}: there is no stage {quoted(stage)}{hint}; there are {', '.join(recipe.stages)}"


def _fits(made: ArtifactKind, wanted: Sequence[ArtifactKind]) -> bool:
    """A file of records of any kind may serve wherever data is wanted, and any data where records are; the content is
    checked when it is read."""
    return (
        made in wanted
        or (made == "records" and bool(DATA_KINDS & set(wanted)))
        or ("records" in wanted and made in DATA_KINDS)
    )


def _in_order(graph: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The order in which the recipe was written, as far as the links allow. `graph` has no cycle."""
    done: list[str] = []
    waiting = list(graph)
    while waiting:
        ready = next(name for name in waiting if graph[name] <= set(done))
        waiting.remove(ready)
        done.append(ready)
    return tuple(done)
