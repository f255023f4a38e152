"""YAML in, plain values out, with the file and line of every key: what error messages point at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarbool import ScalarBoolean

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line, quoted
from kedge.core.yaml.limits import Unreadable, check_digits, check_events, read_bounded

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """A path as messages and `--set` write it; keys come from files, and are shown as they can be read."""
    return ".".join(one_line(str(part)) for part in path)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written: a file and a line, an override (no file), or a script (no file, no text)."""

    file: Path | None
    line: int
    text: str = ""

    def __str__(self) -> str:
        if self.file:
            return f"line {self.line}"
        return f"--set {one_line(self.text)}" if self.text else ""


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
        field_name = dotted(shown) or "(top)"
        where = self.where(path)
        return self.place(path).line, f"{where}: {field_name}: {text}" if where else f"{field_name}: {text}"


def tree_of(values: Any) -> Tree:
    """Values that stood in no file, with the paths of all their keys."""
    places: dict[KeyPath, Place] = {}

    def walk(value: Any, path: KeyPath) -> None:
        places[path] = Place(None, 0)
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, part in cast("Iterable[tuple[str | int, Any]]", items):
            walk(part, (*path, key))

    walk(values, ())
    return Tree(values if isinstance(values, dict) else {}, places)


def read_tree(file: Path, *, noun: str = "recipe", start: str = "`kedge new` writes a recipe to start from") -> Tree:
    """Parse one YAML file. Syntax errors and doubled keys name the line and what was found there.

    Messages call the file a `noun`; of an empty one they say where to `start`.
    """
    try:
        text = read_bounded(file)
    except FileNotFoundError:
        others = sorted(path.name for path in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        listed = f" In {file.parent} there are: {', '.join(others)}." if others else ""
        raise ConfigError(f"{file}: there is no such {noun}.{listed}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); a {noun} is a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        parsed = parse_text(text)
        if parsed is None:
            raise ConfigError(f"{file}: the file is empty; {start}")
        if not isinstance(parsed, CommentedMap):
            raise ConfigError(f"{file}: a {noun} is a mapping of settings, found {_name_of(parsed)} at the top")
        places: dict[KeyPath, Place] = {(): Place(file, 1)}
        return Tree(_plain(parsed, (), file, places), places, file)
    except Unreadable as problem:
        raise ConfigError(f"{file}: 1 problem(s)\n  line {problem.line}: {problem.text}") from None


def parse_scalar(text: str, *, option: str = "--set") -> Any:
    """The value of an option, as of `--set a.b=VALUE`, read as YAML so that numbers, lists and booleans come out
    typed."""
    try:
        return _plain(parse_text(text), (), Path(), {})
    except Unreadable as problem:
        raise ConfigError(f"{option}: cannot read the value {quoted(text)} as YAML: {problem.text}") from None


def plain_tree(parsed: CommentedMap, file: Path, places: dict[KeyPath, Place]) -> dict[str, Any]:
    """The plain values of a document; the place of each goes to `places`."""
    return _plain(parsed, (), file, places)


def parse_text(text: str) -> Any:
    """One document, read twice: first for its size, then for its values."""
    try:
        check_events(YAML(typ="rt", pure=True).parse(text))
        yaml = YAML(typ="rt", pure=True)
        yaml.preserve_quotes = True  # pyright: ignore[reportAttributeAccessIssue]  # for texts that are written again
        return yaml.load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = one_line(str(error.problem).split(" with value")[0])
        raise Unreadable(line, f"{problem}: a key may stand once only") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise Unreadable(line, f"not valid YAML: {one_line(str(error.problem))}") from None
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise Unreadable(line, f"not valid YAML: {one_line(str(error).partition(chr(10))[0])}") from None
    except (YAMLError, ValueError) as error:  # a date of the 99th month is a plain ValueError
        raise Unreadable(1, f"not valid YAML: {one_line(str(error))}") from None


def _plain(node: Any, path: KeyPath, file: Path, places: dict[KeyPath, Place]) -> Any:
    """Strip ruamel's types and note the line of each key and list item on the way."""
    if isinstance(node, CommentedMap):
        keys = [_text_of(key, _line_of(node, key)) for key in node]
        for key, name in zip(node, keys, strict=True):
            if (*path, name) in places:
                raise Unreadable(_line_of(node, key), f"found duplicate key {quoted(name)}: a key may stand once only")
            places[(*path, name)] = Place(file, _line_of(node, key))
        items = zip(keys, node.values(), strict=True)
        return {name: _plain(value, (*path, name), file, places) for name, value in items}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            places[(*path, index)] = Place(file, _line_of(node, index))
        return [_plain(value, (*path, index), file, places) for index, value in enumerate(node)]
    line = places[path].line if path in places else 1
    if isinstance(node, bool | ScalarBoolean):
        return bool(node)
    if isinstance(node, int):
        check_digits(node, line)
        return int(node)
    for plain in (float, str):
        if isinstance(node, plain):
            return plain(node)
    if node is not None:
        raise Unreadable(
            line, f"found {quoted(str(node))}, which YAML reads as a {type(node).__name__}: put it in quotes"
        )
    return None


def _text_of(key: Any, line: int) -> str:
    if not isinstance(key, str | int | float):
        raise Unreadable(line, f"found the key {quoted(key)}: a key is a word")
    return str(key)


def _line_of(node: Any, key: Any) -> int:
    entry: Mapping[Any, Any] = node.lc.data or {}
    return int(entry[key][0]) + 1 if key in entry else int(node.lc.line) + 1


def _name_of(value: Any) -> str:
    return "a list" if isinstance(value, CommentedSeq) else quoted(value)
