"""A recipe as layers: the files it extends, the file or the values of a script, the overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line, quoted
from kedge.core.yaml.limits import Unreadable, check_values
from kedge.core.yaml.source import KeyPath, Place, Tree, parse_scalar, read_tree

Overrides = Sequence[str] | Mapping[str, Any]
"""Settings to change: texts `a.b=v`, whose values are YAML, or values by dotted key."""


def load_layers(file: Path, overrides: Overrides = ()) -> Tree:
    """Read `file`, put it over what it `extends`, and put `overrides` over both."""
    return _overridden(_with_bases(file, chain=()), overrides)


def layers_of(tree: Tree, file: Path, overrides: Overrides = ()) -> Tree:
    """The same for values that no file holds; `file` names them in messages, and paths start in its folder."""
    return _overridden(_over_bases(tree, file, chain=()), overrides)


def merge(under: Tree, over: Tree) -> Tree:
    """Mappings are merged key by key; anything else is replaced as a whole, and `{}` empties a mapping.

    >>> merge(Tree({"a": {"x": 1, "y": 2}}), Tree({"a": {"y": 3}})).values
    {'a': {'x': 1, 'y': 3}}
    >>> merge(Tree({"a": {"x": 1, "y": 2}}), Tree({"a": {}})).values
    {'a': {}}
    """
    values, replaced = _merged(under.values, over.values, ())
    places = {path: place for path, place in under.places.items() if not _is_below(path, replaced)}
    return Tree(values, places | over.places, over.file or under.file, over.root or under.root)


def _with_bases(file: Path, chain: tuple[Path, ...]) -> Tree:
    try:
        resolved = file.resolve()
    except (OSError, RuntimeError):  # a link that leads back to itself
        raise ConfigError(f"{file}: cannot be read: its links lead nowhere, or in a circle") from None
    if resolved in chain:
        circle = " -> ".join(one_line(path.name) for path in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"{file}: `extends` goes in a circle: {circle}")
    return _over_bases(read_tree(file), file, (*chain, resolved))


def _over_bases(tree: Tree, file: Path, chain: tuple[Path, ...]) -> Tree:
    """`tree`, which `file` holds, over the files that it extends. `chain` are the files that led here."""
    bases = tree.values.pop("extends", [])
    place = tree.places.pop(("extends",), Place(file, 1))
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in cast("list[Any]", bases))):
        raise ConfigError(
            f"{file}: 1 problem(s)\n  {place}: extends: a file name or a list of them, found {quoted(bases)}"
        )
    under = Tree({})
    for base in cast("list[str]", bases):
        base_file = file.parent / base
        if not _is_file(base_file):
            raise ConfigError(f"{file}: 1 problem(s)\n  {place}: extends: there is no file {one_line(str(base_file))}")
        under = merge(under, _with_bases(base_file, chain))
    return merge(under, tree)


def _overridden(tree: Tree, overrides: Overrides) -> Tree:
    if isinstance(overrides, Mapping):
        said = {f"{dotted}={quoted(value)}": (dotted, value) for dotted, value in overrides.items()}
        layers = [_override(_path_of(dotted, text), value, text) for text, (dotted, value) in said.items()]
    else:
        layers = [_override(*override_of(text), text) for text in overrides]
    for layer in layers:
        tree = merge(tree, layer)
    return tree


def override_of(text: str) -> tuple[tuple[str, ...], Any]:
    """The path and the value that `--set` changes.

    >>> override_of("stages.ppo.batch=8")
    (('stages', 'ppo', 'batch'), 8)
    """
    dotted, equals, value = text.partition("=")
    if not equals:
        raise _not_an_override(text)
    return _path_of(dotted, text), parse_scalar(value)


def _path_of(dotted: str, text: str) -> tuple[str, ...]:
    path = tuple(dotted.strip().split("."))
    if not all(path):
        raise _not_an_override(text)
    return path


def _override(path: KeyPath, value: Any, text: str) -> Tree:
    try:
        check_values(value, depth=len(path))
    except Unreadable as problem:
        raise ConfigError(f"--set {one_line(text)}: {problem.text}") from None
    for key in reversed(path):
        value = {key: value}
    return Tree(value, {path: Place(None, 0, text)})


def _not_an_override(text: str) -> ConfigError:
    return ConfigError(f"--set {quoted(text)}: expected a.b=value, for example --set stages.ppo.kl.limit=8")


def _merged(under: dict[str, Any], over: dict[str, Any], path: KeyPath) -> tuple[dict[str, Any], set[KeyPath]]:
    values, replaced = dict(under), set[KeyPath]()
    for key, value in over.items():
        here = (*path, key)
        if value and isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key], below = _merged(values[key], cast("dict[str, Any]", value), here)
            replaced |= below
        else:
            values[key] = value
            replaced.add(here)
    return values, replaced


def _is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no disk takes is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _is_below(path: KeyPath, tops: set[KeyPath]) -> bool:
    return any(path[:length] in tops for length in range(1, len(path) + 1))
