"""YAML in, plain values out, with the file and line of every key: what error messages point at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kedge.core.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a file and a line, an override (no file), or a script (no file, no text)."""

    file: Path | None
    line: int
    text: str = ""

    def __str__(self) -> str:
        if self.file:
            return f"line {self.line}"
        return f"--set {self.text}" if self.text else ""


@dataclass(frozen=True, slots=True)
class Tree:
    """Plain values and the place of every key path in them; values of a script have no places."""

    values: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict[KeyPath, Place])
    file: Path | None = None
    root: KeyPath = ()
    """Messages leave these keys out where a path begins with them: whoever wrote one stage alone did not write them."""

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest key above it that was written down."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places.get(path, Place(None, 0))

    def where(self, path: KeyPath) -> str:
        """The place in words; the file is named when it is one that the recipe extends."""
        place = self.place(path)
        is_elsewhere = place.file is not None and place.file != self.file
        return f"{place.file} {place}" if is_elsewhere else str(place)

    def problem(self, path: KeyPath, text: str) -> tuple[int, str]:
        """The line of `path`, by which problems are sorted, and the problem in words: its place, the field, `text`."""
        shown = path[len(self.root) :] if path[: len(self.root)] == self.root else path
        field_name = ".".join(str(part) for part in shown) or "(top)"
        where = self.where(path)
        return self.place(path).line, f"{where}: {field_name}: {text}" if where else f"{field_name}: {text}"


def read_tree(file: Path) -> Tree:
    """Parse one YAML file. Syntax errors and doubled keys name the line and what was found there."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(path.name for path in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        listed = f" In {file.parent} there are: {', '.join(others)}." if others else ""
        raise ConfigError(f"{file}: there is no such recipe.{listed}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a recipe is a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    parsed = _parse(file, text)
    if parsed is None:
        raise ConfigError(f"{file}: the file is empty; `kedge new` writes a recipe to start from")
    if not isinstance(parsed, CommentedMap):
        raise ConfigError(f"{file}: a recipe is a mapping of settings, found {_name_of(parsed)} at the top")
    places: dict[KeyPath, Place] = {(): Place(file, 1)}
    values = _plain(parsed, (), file, places)
    return Tree(values, places, file)


def parse_scalar(text: str) -> Any:
    """The value of `--set a.b=VALUE`, read as YAML so that numbers, lists and booleans come out typed."""
    try:
        return _plain(YAML(typ="rt", pure=True).load(text), (), Path(), {})
    except YAMLError as error:
        raise ConfigError(f"--set: cannot read the value {text!r} as YAML: {error}") from None


def _parse(file: Path, text: str) -> Any:
    try:
        return YAML(typ="rt", pure=True).load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem).split(" with value")[0]
        raise ConfigError(f"{file}: 1 problem(s)\n  line {line}: {problem}: a key may stand once only") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}: 1 problem(s)\n  line {line}: not valid YAML: {error.problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None


def _plain(node: Any, path: KeyPath, file: Path, places: dict[KeyPath, Place]) -> Any:
    """Strip ruamel's types and note the line of each key and list item on the way."""
    if isinstance(node, CommentedMap):
        for key in node:
            places[(*path, str(key))] = Place(file, _line_of(node, key))
        return {str(key): _plain(value, (*path, str(key)), file, places) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            places[(*path, index)] = Place(file, _line_of(node, index))
        return [_plain(value, (*path, index), file, places) for index, value in enumerate(node)]
    for plain in (bool, int, float, str):
        if isinstance(node, plain):
            return plain(node)
    return node


def _line_of(node: Any, key: Any) -> int:
    entry: Mapping[Any, Any] = node.lc.data or {}
    return int(entry[key][0]) + 1 if key in entry else int(node.lc.line) + 1


def _name_of(value: Any) -> str:
    return "a list" if isinstance(value, CommentedSeq) else f"{value!r}"
