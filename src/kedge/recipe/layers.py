"""A recipe as layers: the files it extends, the file itself, the overrides of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import ConfigError
from kedge.recipe.yaml_source import KeyPath, Place, Tree, parse_scalar, read_tree


def load_layers(file: Path, overrides: Sequence[str] = ()) -> Tree:
    """Read `file`, put it over what it `extends`, and put `overrides` (`a.b=v`) over both."""
    tree = _with_bases(file, chain=())
    for text in overrides:
        tree = merge(tree, _override(text))
    return tree


def merge(under: Tree, over: Tree) -> Tree:
    """Mappings are merged key by key; anything else is replaced as a whole.

    >>> merge(Tree({"a": {"x": 1, "y": 2}}), Tree({"a": {"y": 3}})).values
    {'a': {'x': 1, 'y': 3}}
    """
    values, replaced = _merged(under.values, over.values, ())
    kept = {path: place for path, place in under.places.items() if not _is_below(path, replaced)}
    return Tree(values, kept | over.places, over.file or under.file)


def _with_bases(file: Path, chain: tuple[Path, ...]) -> Tree:
    resolved = file.resolve()
    if resolved in chain:
        circle = " -> ".join(path.name for path in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"{file}: `extends` goes in a circle: {circle}")
    tree = read_tree(file)
    bases = tree.values.pop("extends", [])
    place = tree.places.pop(("extends",), Place(file, 1))
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in cast("list[Any]", bases))):
        raise ConfigError(f"{file}: 1 problem(s)\n  {place}: extends: a file name or a list of them, found {bases!r}")
    under = Tree({})
    for base in cast("list[str]", bases):
        base_file = file.parent / base
        if not base_file.is_file():
            raise ConfigError(f"{file}: 1 problem(s)\n  {place}: extends: there is no file {base_file}")
        under = merge(under, _with_bases(base_file, (*chain, resolved)))
    return merge(under, tree)


def _override(text: str) -> Tree:
    dotted, equals, value = text.partition("=")
    path: KeyPath = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text!r}: expected a.b=value, for example --set stages.ppo.kl.limit=8")
    values: Any = parse_scalar(value)
    for key in reversed(path):
        values = {key: values}
    return Tree(values, {path: Place(None, 0, text)})


def _merged(under: dict[str, Any], over: dict[str, Any], path: KeyPath) -> tuple[dict[str, Any], set[KeyPath]]:
    values, replaced = dict(under), set[KeyPath]()
    for key, value in over.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key], below = _merged(values[key], cast("dict[str, Any]", value), here)
            replaced |= below
        else:
            values[key] = value
            replaced.add(here)
    return values, replaced


def _is_below(path: KeyPath, tops: set[KeyPath]) -> bool:
    return any(path[:length] in tops for length in range(1, len(path) + 1))
