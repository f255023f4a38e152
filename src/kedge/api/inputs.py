"""What a script gives to a recipe and a YAML file cannot hold: functions as rewards, rows in memory as data.

Functions become sources of kind `callable`. Rows become files `inputs/NAME.jsonl` of the run's folder, in canonical
form, so that resuming, checks and reports find them as they find any other file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo

from kedge.api.run import Run, StageRun
from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.files import atomic_open
from kedge.core.settings import Section
from kedge.core.stage import DATA_KINDS, DataFile, Input, Stage, WeightedFile
from kedge.core.yaml.problems import unwrapped
from kedge.core.yaml.source import KeyPath, Place
from kedge.data.converting import canonical_lines
from kedge.data.examples import Kind
from kedge.recipe.schema import Recipe

FOLDER = "inputs"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files to be written below a run's folder: their lines by relative name, and the settings that name them."""

    files: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    settings: list[KeyPath] = field(default_factory=list[KeyPath])

    def bound(self, recipe: Recipe, folder: Path) -> Recipe:
        """The recipe with the names of these files relative to `folder`, as if they were written there."""
        places = {path: Place(folder / "run.json", 0) for path in self.settings}
        return replace(recipe, tree=replace(recipe.tree, places={**recipe.tree.places, **places}))

    def write(self, folder: Path) -> None:
        """Write the files that are not there yet, each whole or not at all."""
        for name, lines in self.files.items():
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_open(target) as file:
                    file.writelines(lines)

    def refuse_changed(self, folder: Path) -> None:
        """A run is gone on with on the rows that it was started with."""
        for name, lines in self.files.items():
            target = folder / name
            if target.is_file() and target.read_bytes() != b"".join(lines):
                raise ConfigError(
                    f"{target}: this run was started with other rows than those given now as `{target.stem}`; give "
                    "the same ones again, or start a new run in another folder"
                )


def recipe_values(values: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """A recipe as a script wrote it, with plain values only. Rows go to `inputs`, named by their stage and field."""
    stages: Any = values.get("stages")
    if not isinstance(stages, Mapping):
        return dict(values)
    plain = {name: _stage_values(name, stage, inputs) for name, stage in cast("Mapping[str, Any]", stages).items()}
    return {**values, "stages": plain}


def _stage_values(name: str, values: Any, inputs: Inputs) -> Any:
    if not isinstance(values, Mapping):
        return values
    settings = cast("Mapping[str, Any]", values)
    kind = settings.get("kind")
    if kind not in plugins.names("stages"):  # the recipe's own check says so
        return dict(settings)
    stage: Stage = plugins.find("stages", str(kind))
    return stage_values(settings, stage.settings, inputs, path=("stages", name), prefix=f"{name}.")


def stage_values(
    values: Mapping[str, Any], section: type[Section], inputs: Inputs, *, path: KeyPath, prefix: str = ""
) -> dict[str, Any]:
    """The settings at `path` as a recipe holds them; files are named by `prefix` and the field."""
    known = {key: info for name, info in section.model_fields.items() for key in (name, info.alias) if key}
    plain: dict[str, Any] = {}
    for key, value in values.items():
        info = known.get(key)
        inner = _section_of(info) if info is not None else None
        mark = next((mark for mark in info.metadata if isinstance(mark, Input)), None) if info is not None else None
        if info is not None and mark is not None:
            plain[key] = _input(value, mark, inputs, info=info, path=(*path, key), name=f"{prefix}{key}")
        elif inner is not None and isinstance(value, Mapping):
            settings = cast("Mapping[str, Any]", value)
            plain[key] = stage_values(settings, inner, inputs, path=(*path, key), prefix=f"{prefix}{key}.")
        else:
            plain[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return plain


def _section_of(info: FieldInfo) -> type[Section] | None:
    """The one section that a field holds; a choice between several holds no inputs."""
    sections = [kind for kind in unwrapped(info.annotation) if isinstance(kind, type) and issubclass(kind, Section)]
    return sections[0] if len(sections) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataField:
    """A settings field that names data: where it is, what it may hold, and the name of the file that rows become."""

    path: KeyPath
    name: str
    kinds: tuple[Kind, ...]
    """Any kind where there is none."""
    takes_several: bool
    """Whether it may name several files."""


def _input(value: Any, mark: Input, inputs: Inputs, *, info: FieldInfo, path: KeyPath, name: str) -> Any:
    if "reward_model" in mark.kinds and "model" not in mark.kinds:  # an exam names models of both kinds
        return source_of(value)
    if not DATA_KINDS & set(mark.kinds):
        return [place_of(item) for item in cast("list[Any]", value)] if isinstance(value, list) else place_of(value)
    kinds = cast("tuple[Kind, ...]", tuple(kind for kind in mark.kinds if kind != "records"))
    return _data(value, _DataField(path=path, name=name, kinds=kinds, takes_several=mark.several), inputs)


def place_of(value: Any) -> Any:
    """A model as a recipe names it: a run or stage stands for the model that it made."""
    match value:
        case Run():
            return place_of(value.only_stage())
        case StageRun():
            return str(value.model)
        case os.PathLike():
            return os.fspath(cast("os.PathLike[str]", value))
        case _:
            return value


def source_of(value: Any) -> Any:
    """A reward as a recipe describes it: a function is a source of its own, and a list is the sum of its parts."""
    match value:
        case None | str() | os.PathLike() | Run() | StageRun():
            return place_of(value)
        case Mapping():
            source = dict(cast("Mapping[str, Any]", value))
            if isinstance(parts := source.get("parts"), Mapping):
                named = cast("Mapping[str, Any]", parts)
                source["parts"] = {name: _part(part) for name, part in named.items()}
            return {key: place_of(item) for key, item in source.items()}
        case list() | tuple():
            return {"kind": "mix", "parts": _named([_part(part) for part in cast("Sequence[Any]", value)])}
        case _ if callable(value):
            return {"kind": "callable", "function": value}
        case _:
            return value


def _part(value: Any) -> Any:
    """One source of a mix, which names its kind where a reward model alone would be named by its place."""
    source = source_of(value)
    return {"kind": "model", "from": source} if isinstance(source, str) else source


def _named(parts: Sequence[Any]) -> dict[str, Any]:
    """Parts under the name of their function or kind; the second of a name is `NAME-2`.

    >>> list(_named([{"kind": "exact"}, {"kind": "callable", "function": len}, {"kind": "exact"}]))
    ['exact', 'len', 'exact-2']
    """
    named: dict[str, Any] = {}
    for part in parts:
        first = name = _name_of(part)
        number = 1
        while name in named:
            number += 1
            name = f"{first}-{number}"
        named[name] = part
    return named


def _name_of(part: Any) -> str:
    source = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    function: Any = source.get("function")
    if function is None:
        return str(source.get("kind", "part"))
    bare: Any = function.func if isinstance(function, partial) else function
    return str(getattr(bare, "__name__", type(bare).__name__)).strip("<>")


def _data(value: Any, field: _DataField, inputs: Inputs) -> Any:
    """The name of a file as it is; rows as the name of the file that they will be."""
    if value is None or isinstance(value, str | os.PathLike):
        return place_of(value)
    if _is_data_file(value):
        return _described(value)
    if isinstance(value, list) and any(_is_data_file(item) for item in cast("list[Any]", value)):
        return [_described(item) if _is_data_file(item) else place_of(item) for item in cast("list[Any]", value)]
    items = _items(value, field.name)
    if items is None:
        return value
    is_file = [isinstance(item, str | os.PathLike) for item in items]
    if all(is_file) and field.kinds != ("prompts",):
        return [os.fspath(item) for item in items]
    if field.takes_several and not isinstance(items[0], Mapping):
        if any(is_file):
            raise ConfigError(f"{field.name}: found files and rows in one list; give all as files, or all as rows")
        parts = [replace(field, name=f"{field.name}-{number}") for number in range(1, len(items) + 1)]
        return [_data(item, part, inputs) for item, part in zip(items, parts, strict=True)]
    target = f"{FOLDER}/{field.name}.jsonl"
    inputs.files[target] = canonical_lines(items, field.kinds, name=field.name)
    inputs.settings.append(field.path)
    return target


def _is_data_file(value: Any) -> bool:
    """A file and how it is read, as a recipe writes it."""
    if isinstance(value, DataFile):
        return True
    return isinstance(value, Mapping) and "file" in value and set(cast("Any", value)) <= set(WeightedFile.model_fields)


def _described(value: Any) -> dict[str, Any]:
    fields = value.model_dump(exclude_none=True) if isinstance(value, DataFile) else dict(value)
    return {**fields, "file": place_of(fields["file"])}


def _items(value: Any, name: str) -> list[Any] | None:
    """Rows of a list, a dataset or a table; None for what has none, which the recipe's own check is left to refuse."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, cast("Mapping[Any, Any]", value)))
        raise ConfigError(f"{name}: found a mapping with {keys}; give rows, such as one split of a dataset")
    if hasattr(value, "with_format"):  # a dataset of `datasets`, whose rows may be set to come as tensors
        value = value.with_format(None)
    elif hasattr(value, "to_dict") and hasattr(value, "columns"):  # a data frame of pandas
        value = value.to_dict("records")
    return list(cast("Iterable[Any]", value)) if isinstance(value, Iterable) else None
