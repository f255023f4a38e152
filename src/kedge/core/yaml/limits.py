"""How large a YAML file may be. Whatever is beyond is no recipe, and is refused before it costs memory or time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from kedge.core.errors import ConfigError
from kedge.core.quoting import one_line, quoted

MAX_BYTES: Final = 2**20
"""Of one file; the longest recipe that we ship has four thousand."""
MAX_DEPTH: Final = 40
"""Mappings and lists inside each other."""
MAX_VALUES: Final = 20_000
"""Keys, values and list items, those that aliases repeat counted each time."""
MAX_DIGITS: Final = 300
"""Of a whole number: as many as the largest float has."""

_LONG_NUMBER: Final = re.compile(rf"[-+]?[0-9_]{{{MAX_DIGITS + 1},}}")
_PLAIN_TAGS: Final = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))
_COLLECTION_TAGS: Final = frozenset(("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"))


class Unreadable(Exception):
    """What a recipe cannot have, and its line."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


def read_bounded(file: Path) -> str:
    """The text of a file, which is not read beyond `MAX_BYTES`: a device may have no end."""
    with file.open("rb") as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES // 2**20} MiB, the most that a file of settings may have")
    return content.decode("utf-8-sig")


def check_events(events: Iterable[Any]) -> None:
    """Raise `Unreadable` at the first event of YAML with which a document is too deep or too large, or not plain.

    An alias counts as many values as its anchor has, so that ten lines cannot stand for a billion of them.
    """
    sizes: dict[str, int | None] = {}  # by anchor; None while the anchor's own node is open
    opened: list[tuple[str | None, int]] = []  # of every collection around: its anchor, and the count before it
    count = 0
    for event in events:
        line = int(event.start_mark.line) + 1
        if isinstance(event, CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = count - before
        if not isinstance(event, NodeEvent):
            continue
        count += _size_of_alias(event, sizes, line) if isinstance(event, AliasEvent) else 1
        if isinstance(event, CollectionStartEvent):
            opened.append((event.anchor, count - 1))
        if event.anchor and not isinstance(event, AliasEvent):
            sizes[event.anchor] = None if isinstance(event, CollectionStartEvent) else 1
        if len(opened) > MAX_DEPTH:
            raise Unreadable(line, f"more than {MAX_DEPTH} mappings or lists inside each other")
        if count > MAX_VALUES:
            raise Unreadable(line, f"more than {MAX_VALUES:,} values, with those that aliases repeat")
        _refuse_tag(event, line)
        if isinstance(event, ScalarEvent) and _LONG_NUMBER.fullmatch(str(event.value)):
            raise Unreadable(line, f"a whole number of more than {MAX_DIGITS} digits")


def check_values(values: Any, depth: int = 1) -> int:
    """The same for values that a script holds, one of which may hold itself; returns how many there are."""
    if depth > MAX_DEPTH + 1:
        raise Unreadable(0, f"more than {MAX_DEPTH} mappings or lists inside each other")
    if isinstance(values, int) and not isinstance(values, bool):
        check_digits(values)
    inner: Iterable[Any] = ()
    if isinstance(values, Mapping):
        mapping = cast("Mapping[Any, Any]", values)
        if strange := [key for key in mapping if not isinstance(key, str)]:
            raise Unreadable(0, f"keys are text, found {quoted(strange[0])}")
        inner = mapping.values()
    elif isinstance(values, list | tuple):
        inner = cast("list[Any]", values)
    count = 1
    for value in inner:
        count += check_values(value, depth + 1)
        if count > MAX_VALUES:
            raise Unreadable(0, f"more than {MAX_VALUES:,} values")
    return count


def check_digits(number: int, line: int = 0) -> None:
    """Longer numbers cannot even be printed."""
    if number.bit_length() > MAX_DIGITS * 3.33:
        raise Unreadable(line, f"a whole number of more than {MAX_DIGITS} digits")


def _size_of_alias(event: Any, sizes: Mapping[str, int | None], line: int) -> int:
    size = sizes.get(event.anchor, 1)  # one without an anchor is reported when the file is read
    if size is None:
        raise Unreadable(line, f"*{one_line(event.anchor)} stands inside of what it repeats")
    return size


def _refuse_tag(event: Any, line: int) -> None:
    """Tags ask for objects of a language; a recipe has text, numbers, booleans, lists and mappings."""
    tag = None if isinstance(event, AliasEvent) else event.tag
    allowed = _PLAIN_TAGS if isinstance(event, ScalarEvent) else _COLLECTION_TAGS
    if tag is not None and str(tag) not in allowed:
        kind = "mapping" if isinstance(event, MappingStartEvent) else "value"
        raise Unreadable(line, f"a {kind} with the tag {one_line(str(tag))}: a file of settings has plain values only")
