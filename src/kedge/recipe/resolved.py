"""A recipe with every default filled in, one setting at a time, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kedge.core.quoting import escaped_json, one_line
from kedge.core.settings import Section, default_of
from kedge.core.yaml.source import KeyPath, Place, Tree, dotted
from kedge.recipe.schema import Recipe

Origin = Literal["file", "--set", "script", "stage", "built-in"]
"""`stage`: what this kind of stage, or its method, says where the section's own default is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `place` says where it was written, for those that were."""

    path: KeyPath
    value: Any
    origin: Origin
    place: Place | None = None

    def __str__(self) -> str:
        """A line `path = value  # origin`; what stands before the `#` can be given to `--set`, without the blanks."""
        return f"{dotted(self.path)} = {self.shown()}  # {self.source()}"

    def shown(self) -> str:
        """The value as JSON, which YAML reads too."""
        return escaped_json(json.dumps(self.value, ensure_ascii=False))

    def source(self) -> str:
        """The origin, for a file with its name and line."""
        if self.origin == "file" and self.place is not None and self.place.file is not None:
            return f"file: {one_line(self.place.file.name)} line {self.place.line}"
        return self.origin

    def as_dict(self) -> dict[str, Any]:
        file = self.place.file if self.place else None
        line = self.place.line if self.place and file else None
        return {
            "path": dotted(self.path),
            "value": self.value,
            "from": self.origin,
            "file": str(file) if file else None,
            "line": line,
        }


def resolved_settings(recipe: Recipe) -> list[Setting]:
    """Every setting of the recipe, in the order of its sections."""
    settings = list(_walk(recipe.settings, (), recipe.tree))
    for name, section in recipe.stages.items():
        settings += _walk(section, ("stages", name), recipe.tree)
    return settings


def _walk(section: Section, path: KeyPath, tree: Tree) -> Iterator[Setting]:
    plain = section.model_dump(mode="json", by_alias=True, exclude=None if path else {"stages"})
    for name, info in type(section).model_fields.items():
        if info.exclude or (not path and name == "stages"):
            continue
        key, value = info.alias or name, getattr(section, name)
        here = (*path, key)
        written = _written(here, tree) or _written((*path, name), tree)
        if written is None and key == "kind":  # `method: grpo` is short for `method: {kind: grpo}`
            written = _written_as_word(path, tree)
        is_default = default_of(info) == value
        yield from _below(value, plain[key], here, tree, written, is_default=is_default)


def _below(
    value: Any, plain: Any, path: KeyPath, tree: Tree, written: Place | None, *, is_default: bool
) -> Iterator[Setting]:
    """The settings of a section, of the parts of a mapping, or the one that a plain value is."""
    if isinstance(value, Section):
        yield from _walk(value, path, tree)
    elif isinstance(value, Mapping) and value:
        for key, part in cast("Mapping[str, Any]", value).items():
            here = (*path, key)
            yield from _below(part, plain[key], here, tree, _written(here, tree), is_default=is_default)
    else:
        origin: Origin = _origin(written) if written else "built-in" if is_default else "stage"
        yield Setting(path=path, value=plain, origin=origin, place=written)


def _origin(place: Place) -> Origin:
    if place.file is not None:
        return "file"
    return "--set" if place.text else "script"


def _written(path: KeyPath, tree: Tree) -> Place | None:
    """Where the value at `path` was written; None where it was not."""
    values: Any = tree.values
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return None
        values = cast("Mapping[Any, Any]", values)[key]
    return tree.place(path)


def _written_as_word(path: KeyPath, tree: Tree) -> Place | None:
    values: Any = tree.values
    for key in path:
        values = cast("Mapping[Any, Any]", values).get(key) if isinstance(values, Mapping) else None
    return tree.place(path) if isinstance(values, str) else None
