"""From rows to examples: the format of a file, recognised by its fields, and one row of it as a record.

The shapes below are tried in order; the first that fits a row wins, and the most common one among the first rows is
the file's. Fields that a shape does not read stay in `extra`. `answer` beside `prompt` is a checkable solution, not
a demonstration: those say `completion`, `response` or `output`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.core.suggest import nearest
from kedge.data.build import LABELS, OPTIONAL, Fields, conversation_pair, demonstration, pair, prompt, ranking, thumb
from kedge.data.examples import Example, Kind, Origin
from kedge.data.messages import ROLES, is_conversation, is_text_or_messages, is_transcript, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a file was recognised as. `columns` says which field plays which part: {"prompt": "question", …}."""

    name: str
    kind: Kind
    columns: Mapping[str, str] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns.values())})"


@dataclass(frozen=True, slots=True)
class _Need:
    part: str
    names: tuple[str, ...]
    fits: Callable[[Any], bool]
    wants: str


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    kind: Kind
    needs: tuple[_Need, ...]
    build: Callable[[Fields], Example]


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_label(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and value in LABELS


def _ends_with_assistant(value: Any) -> bool:
    if not is_conversation(value):
        return False
    last = cast(list[Mapping[str, Any]], value)[-1]
    role = last.get("role", last.get("from"))
    return isinstance(role, str) and ROLES.get(role.lower()) == "assistant"


_TURNS = "text or messages"
_CONVERSATION = ("messages", "conversations", "conversation")
_ANSWER = ("completion", "response", "output")
_PROMPT = _Need("prompt", ("prompt", "question", "instruction", "query", "problem"), is_text_or_messages, _TURNS)
_ANSWERS = _Need("answers", ("answers", "responses", "completions"), _is_list, "a list of answers")
_LABEL = _Need("label", ("label",), _is_label, "true/false, 1/0 or up/down")
_DIALOGUE = _Need("messages", _CONVERSATION, _ends_with_assistant, "messages that end with the assistant's")


def _two(fits: Callable[[Any], bool], wants: str) -> tuple[_Need, _Need]:
    return _Need("chosen", ("chosen",), fits, wants), _Need("rejected", ("rejected",), fits, wants)


_SHAPES = (
    _Shape("pairs", "pairs", (_PROMPT, *_two(is_text_or_messages, _TURNS)), pair),
    _Shape("conversation pairs", "pairs", _two(is_conversation, "whole conversations as messages"), conversation_pair),
    _Shape("transcript pairs", "pairs", _two(is_transcript, "'Human: … Assistant: …' transcripts"), conversation_pair),
    _Shape(
        "rankings",
        "rankings",
        (_PROMPT, _ANSWERS, _Need("rank", ("rank", "ranks", "ranking"), _is_list, "a list of places, 1 is best")),
        ranking,
    ),
    _Shape(
        "scored answers",
        "rankings",
        (_PROMPT, _ANSWERS, _Need("scores", ("scores",), _is_list, "a list of numbers, higher is better")),
        ranking,
    ),
    _Shape(
        "thumbs",
        "thumbs",
        (_PROMPT, _Need("completion", (*_ANSWER, "answer"), is_text_or_messages, _TURNS), _LABEL),
        thumb,
    ),
    _Shape("labelled conversations", "thumbs", (_DIALOGUE, _LABEL), thumb),
    _Shape("conversations", "demonstrations", (_DIALOGUE,), demonstration),
    _Shape(
        "completions",
        "demonstrations",
        (_PROMPT, _Need("completion", _ANSWER, is_text_or_messages, _TURNS)),
        demonstration,
    ),
    _Shape(
        "open conversations",
        "prompts",
        (_Need("messages", _CONVERSATION, is_conversation, "messages that end with the user's"),),
        prompt,
    ),
    _Shape("prompts", "prompts", (_PROMPT,), prompt),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}

# Every field name that a format reads.
KNOWN_FIELDS = frozenset(name for shape in _SHAPES for need in shape.needs for name in need.names) | OPTIONAL

# A row with one of these, or with a name that is nearly one of these, was meant to be more than a bare prompt.
_RESPONSE_FIELDS = ("chosen", "rejected", "messages", "completion")


def recognise(sample: Sequence[Mapping[str, Any]], *, kind: Kind | None = None) -> Format:
    """The format that most rows of `sample` have; `kind` is what the caller will use them as.

    >>> str(recognise([{"question": "2 + 2?", "answer": "4"}]))
    'prompts (question)'
    """
    votes = Counter(fmt for row in sample if (fmt := _format_of(row, is_bare_fine=kind == "prompts")) is not None)
    if not votes:
        raise DataError(_unknown(sample))
    ranked = votes.most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        listed = " and ".join(f"{count} × {fmt}" for fmt, count in ranked)
        raise DataError(f"the first rows have two formats in equal number: {listed}. Put each into a file of its own.")
    return ranked[0][0]


def _format_of(row: Mapping[str, Any], *, is_bare_fine: bool) -> Format | None:
    for shape in _SHAPES:
        columns = _columns(row, shape)
        if columns is not None:
            if shape.name == "prompts" and not is_bare_fine and _near_misses(row, set(columns.values())):
                return None
            return Format(name=shape.name, kind=shape.kind, columns=columns)
    return None


def _columns(row: Mapping[str, Any], shape: _Shape) -> dict[str, str] | None:
    columns: dict[str, str] = {}
    for need in shape.needs:
        name = next((name for name in need.names if row.get(name) is not None), None)
        if name is None or not need.fits(row[name]):
            return None
        columns[need.part] = name
    return columns


def _near_misses(row: Mapping[str, Any], read: set[str]) -> bool:
    unread = (name for name, value in row.items() if value is not None and name not in read)
    # Stricter than a suggestion: 'solution' beside a prompt is not a misspelt 'completion'.
    return any(get_close_matches(name.lower(), _RESPONSE_FIELDS, n=1, cutoff=0.8) for name in unread)


def _unknown(sample: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for row in sample for name, value in row.items() if value is not None})
    known = sorted({name for shape in _SHAPES for need in shape.needs for name in need.names})
    hints = [f"'{name}' → '{meant}'" for name in names if name not in known and (meant := nearest(name, known))]
    guess = f" Did you mean {', '.join(hints)}?" if hints else ""
    formats = "\n".join(f"  {shape.kind}: {_needs(shape)}" for shape in _SHAPES)
    return (
        f"no known format has these fields: {', '.join(names) or 'none'}.{guess} {_closest(sample[0])}\n"
        f"Each format needs:\n{formats}\n  (prompt may also be called {', '.join(_PROMPT.names[1:])})"
    )


def _closest(row: Mapping[str, Any]) -> str:
    """The format that the first row comes closest to, and what it lacks of it."""

    def present(shape: _Shape) -> int:
        return sum(any(row.get(name) is not None for name in need.names) for need in shape.needs)

    shape = max(_SHAPES, key=present)
    if present(shape) == 0:
        return ""
    lacks: list[str] = []
    for need in shape.needs:
        name = next((name for name in need.names if row.get(name) is not None), None)
        if name is None:
            lacks.append(f"'{need.part}' is missing")
        elif not need.fits(row[name]):
            lacks.append(f"'{name}' is {shown(row[name])} but must be {need.wants}")
    return f"The first row is closest to {shape.kind}, but {' and '.join(lacks)}."


def _needs(shape: _Shape) -> str:
    needs = (need.names[:1] if need is _PROMPT else need.names for need in shape.needs)
    return ", ".join(f"{' or '.join(names)} ({need.wants})" for names, need in zip(needs, shape.needs, strict=True))


def parse(fields: Mapping[str, Any], fmt: Format, origin: Origin) -> Example:
    """A row of a file of format `fmt` as an example; a DataError says why it is none."""
    shape = _BY_NAME[fmt.name]
    for need in shape.needs:
        name = fmt.columns[need.part]
        value = fields.get(name)
        if value is None:
            raise DataError(f"field '{name}' is missing (found: {', '.join(fields) or 'none'})")
        if not need.fits(value):
            raise DataError(f"field '{name}' is {shown(value)}; it must be {need.wants}")
    return shape.build(Fields(fields, fmt.columns, origin))
