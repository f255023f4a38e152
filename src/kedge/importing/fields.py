"""The fields of a YAML or JSON file, those inside of chosen mappings and lists under dotted names, with their lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kedge.core.yaml.source import KeyPath, Tree, read_tree


def read_fields(file: Path, nested: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, int]]:
    """Fields by name, and the line of each. JSON is YAML; both are read with its limits, and no tag is obeyed."""
    tree = read_tree(file, noun="configuration", start="name the file that the other tool is started with")
    fields: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in tree.values.items():
        _add(key, (key,), value, tree, fields, lines, is_open=key in nested)
    return fields, lines


def _add(
    name: str, path: KeyPath, value: Any, tree: Tree, fields: dict[str, Any], lines: dict[str, int], *, is_open: bool
) -> None:
    """A mapping or a list of mappings that is open gives a field for each of its keys; everything else is one field."""
    if is_open and isinstance(value, Mapping) and value:
        for key, part in cast("Mapping[str, Any]", value).items():
            _add(f"{name}.{key}", (*path, key), part, tree, fields, lines, is_open=False)
    elif is_open and isinstance(value, list) and value:
        for index, part in enumerate(cast("list[Any]", value)):
            _add(f"{name}[{index}]", (*path, index), part, tree, fields, lines, is_open=isinstance(part, Mapping))
    else:
        fields[name] = value
        lines[name] = tree.place(path).line
