"""Changes of settings in the text of a recipe, comments and all that is not changed kept as they are."""

from __future__ import annotations

from difflib import unified_diff

from kedge.core.yaml.editing import with_value, without
from kedge.plan.ways import Changes


def changed_text(text: str, changes: Changes) -> str:
    """The recipe in `text` with other settings.

    >>> print(changed_text("a: 1  # one\\nb: {c: 2}\\n", {("b", "d"): True, ("b", "c"): None}), end="")
    a: 1  # one
    b: {d: true}
    """
    is_layer = any(line.startswith("extends:") for line in text.splitlines())
    for path, value in changes.items():
        # What a recipe below this one says is not taken out by saying nothing.
        text = without(text, path) if value is None and not is_layer else with_value(text, path, value)
    return text


def diff_lines(text: str, changes: Changes, name: str) -> list[str]:
    """A unified diff of the recipe `name`."""
    lines = unified_diff(
        text.splitlines(),
        changed_text(text, changes).splitlines(),
        fromfile=name,
        tofile=f"{name} (proposed)",
        lineterm="",
        n=2,
    )
    return list(lines)
