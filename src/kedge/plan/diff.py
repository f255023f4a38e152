"""Changes of settings in the text of a recipe, comments and all that is not changed kept as they are."""

from __future__ import annotations

from difflib import unified_diff
from io import StringIO
from typing import Any, Final, cast

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from kedge.plan.ways import Changes

_INDENTS: Final = ((2, 2, 0), (2, 4, 2), (4, 4, 0), (4, 6, 4))
"""Of mappings, of sequences and of their dashes: the ways in which people write YAML."""


def changed_text(text: str, changes: Changes) -> str:
    """The recipe in `text` with other settings. What is not changed stays as it was written, where the YAML library can
    write it so.

    >>> print(changed_text("a: 1  # one\\nb: {c: 2}\\n", {("b", "d"): True, ("a",): None}), end="")
    b: {c: 2, d: true}
    """
    writer = min((_writer(indent) for indent in _INDENTS), key=lambda writer: _noise(text, writer))
    tree: Any = writer.load(text)
    for path, value in changes.items():
        _set(tree, path, value)
    return _dumped(writer, tree)


def diff_lines(text: str, changes: Changes, name: str) -> list[str]:
    """A unified diff of the recipe `name`."""
    changed = changed_text(text, changes)
    lines = unified_diff(
        text.splitlines(), changed.splitlines(), fromfile=name, tofile=f"{name} (proposed)", lineterm="", n=2
    )
    return list(lines)


def _writer(indent: tuple[int, int, int]) -> Any:
    writer: Any = YAML()  # round trip: comments, order and quotes stay
    writer.preserve_quotes = True
    writer.width = 2**16
    mapping, sequence, offset = indent
    writer.indent(mapping=mapping, sequence=sequence, offset=offset)
    return writer


def _noise(text: str, writer: Any) -> int:
    """Lines that change although nothing was changed."""
    written = _dumped(writer, writer.load(text))
    return sum(line[:1] in "+-" for line in unified_diff(text.splitlines(), written.splitlines(), lineterm="", n=0))


def _dumped(writer: Any, tree: Any) -> str:
    stream = StringIO()
    writer.dump(tree, stream)
    return stream.getvalue()


def _set(tree: Any, path: tuple[str, ...], value: Any) -> None:
    *above, last = path
    for key in above:
        if not isinstance(tree.get(key), dict):
            if value is None:
                return
            tree[key] = _flow() if key != above[0] else CommentedMap()
        tree = cast("dict[str, Any]", tree[key])
    if value is None:
        tree.pop(last, None)
    else:
        tree[last] = value


def _flow() -> CommentedMap:
    """A new mapping is written on one line."""
    mapping: Any = CommentedMap()
    mapping.fa.set_flow_style()
    return cast(CommentedMap, mapping)
