"""One setting of a YAML text changed, with all comments and the order of everything else left as they are."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from kedge.core.errors import ConfigError
from kedge.core.yaml.limits import MAX_DEPTH, Unreadable, check_values
from kedge.core.yaml.source import KeyPath, Place, Tree, parse_text, plain_tree

_WIDTH = 120
_BLOCK_DEPTH = 3
"""Down to the settings of a stage mappings have a line a key; deeper ones are written in one line."""


def tree_of_text(text: str, file: Path) -> Tree:
    """A YAML text that is to be in `file`, as `read_tree` gives it; an error names the line."""
    try:
        parsed = parse_text(text)
        if not isinstance(parsed, CommentedMap):
            raise ConfigError(f"{file.name}: a recipe is a mapping of settings, such as `name: first`")
        places: dict[KeyPath, Place] = {(): Place(file, 1)}
        return Tree(plain_tree(parsed, file, places), places, file)
    except Unreadable as problem:
        raise ConfigError(f"{file.name}: line {problem.line}: {problem.text}") from None


def with_value(text: str, path: KeyPath, value: Any) -> str:
    """The text with `value` at `path`; mappings on the way are made where they are missing.

    >>> with_value("a: 1 # one\\nb: {c: 2}\\n", ("b", "d"), 3)
    'a: 1 # one\\nb: {c: 2, d: 3}\\n'
    """
    document = _document(text)
    try:
        check_values(value, depth=len(path))
    except Unreadable as problem:
        raise ConfigError(problem.text) from None
    if not path or len(path) > MAX_DEPTH:
        raise ConfigError("there is no such setting")
    here: Any = document
    for depth, key in enumerate(path[:-1]):
        here = _below(here, key, is_flow=depth + 1 >= _BLOCK_DEPTH)
    _put(here, path[-1], _node(value, is_flow=len(path) >= _BLOCK_DEPTH))
    return _written(document, text)


def without(text: str, path: KeyPath) -> str:
    """The text without what stands at `path`.

    >>> without("a: 1\\nb: {c: 2, d: 3}\\n", ("b", "c"))
    'a: 1\\nb: {d: 3}\\n'
    """
    document = _document(text)
    here: Any = document
    for key in path[:-1]:
        if not isinstance(here, CommentedMap) or key not in here:
            return text
        here = here[key]
    if not isinstance(here, CommentedMap) or path[-1] not in here:
        return text
    del here[path[-1]]
    return _written(document, text)


def _document(text: str) -> CommentedMap:
    try:
        parsed = parse_text(text)
    except Unreadable as problem:
        raise ConfigError(f"line {problem.line}: {problem.text}") from None
    if parsed is None:
        return CommentedMap()
    if not isinstance(parsed, CommentedMap):
        raise ConfigError("a recipe is a mapping of settings, such as `name: first`")
    return parsed


def _below(here: Any, key: str | int, *, is_flow: bool) -> Any:
    """The mapping at `key`; a bare word there is the `kind` of one."""
    if isinstance(here, CommentedSeq):
        if not isinstance(key, int) or not 0 <= key < len(here):
            raise ConfigError("there is no such setting")
        return here[key]
    before: Any = here.get(key)
    if not isinstance(before, CommentedMap | CommentedSeq):
        own: dict[str, Any] = {"kind": before} if isinstance(before, str) and before else {}
        _put(here, key, _node(own, is_flow=is_flow))
    return here[key]


def _put(here: Any, key: str | int, node: Any) -> None:
    if isinstance(here, CommentedSeq) and not (isinstance(key, int) and 0 <= key < len(here)):
        raise ConfigError("there is no such setting")
    here[key] = node


def _node(value: Any, *, is_flow: bool) -> Any:
    if isinstance(value, Mapping):
        node = CommentedMap()
        for key, part in cast("Mapping[str, Any]", value).items():
            node[key] = _node(part, is_flow=is_flow)
    elif isinstance(value, list):
        node = CommentedSeq([_node(part, is_flow=True) for part in cast("list[Any]", value)])
    else:
        return value
    if is_flow or isinstance(node, CommentedSeq):
        cast(Any, node).fa.set_flow_style()
    return node


def _written(document: CommentedMap, text: str) -> str:
    """The document, whose text was `text`: lines that were longer than ours stay as long as they were."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = max(_WIDTH, *map(len, text.splitlines()), 0)  # pyright: ignore[reportAttributeAccessIssue]
    target = io.StringIO()
    yaml.dump(document, target)
    return target.getvalue()
