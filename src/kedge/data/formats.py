"""From rows to examples: the format of a file, recognised by its fields, and one row of it as a record.

Layouts of others (`kedge.data.foreign`) are tried first, then the shapes below in order; the first that fits a row
wins, and the most common one among the first rows is the file's. Fields that a shape does not read stay in `extra`,
but for those that look like a verdict or a second answer: they are an error. `answer` beside `prompt` is a checkable
solution, not a demonstration: those say `completion`, `response` or `output`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.core.suggest import did_you_mean, nearest
from kedge.data.build import (
    OPTIONAL,
    Fields,
    conversation_pair,
    demonstration,
    document,
    pair,
    prompt,
    ranking,
    thumb,
)
from kedge.data.columns import NO_COLUMNS, Columns
from kedge.data.examples import Example, Kind, Origin
from kedge.data.foreign.labels import LABEL_WORDS, is_label, is_word_label
from kedge.data.foreign.table import RATED, Layout, layout_of, rewritten
from kedge.data.foreign.unread import refusal
from kedge.data.messages import ROLES, is_conversation, is_text_or_messages, is_transcript, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a file was recognised as. `columns` says which field plays which part: {"prompt": "question", …}.

    `layout` is the foreign layout that it has, `pick` what was chosen where that has several judgements. Where only the
    prompts are wanted, `is_strict` is false: what looks like an answer need not be read.
    """

    name: str
    kind: Kind
    columns: Mapping[str, str] = field(hash=False)
    layout: Layout | None = field(default=None, hash=False)
    pick: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    is_strict: bool = True

    @property
    def note(self) -> str:
        return self.layout.note if self.layout is not None else ""

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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


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
_SCALES = frozenset({"rating", "feedback", "verdict", "vote", "preference"})
"""Labels only where they are words: a number may be a step of a longer scale."""
_LABEL = _Need(
    "label", ("label", "kto_tag", "thumb", "thumbs", "liked", "is_good", *sorted(_SCALES)), is_label, LABEL_WORDS
)
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
    _Shape("text", "demonstrations", (_Need("text", ("text",), _is_text, "text"),), document),
    _Shape("prompts", "prompts", (_PROMPT,), prompt),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}

# Every field name that a format reads.
KNOWN_FIELDS = frozenset(name for shape in _SHAPES for need in shape.needs for name in need.names) | OPTIONAL

# A row with one of these, or with a name that is nearly one of these, was meant to be more than a bare prompt.
_RESPONSE_FIELDS = ("chosen", "rejected", "messages", "completion")


def recognise(
    sample: Sequence[Mapping[str, Any]],
    *,
    kind: Kind | None = None,
    columns: Columns = NO_COLUMNS,
    is_strict: bool = True,
) -> Format:
    """The format that most rows of `sample` have; `kind` is what the caller will use them as.

    >>> str(recognise([{"question": "2 + 2?", "answer": "4"}]))
    'prompts (question)'
    """
    columns.refuse_missing(sample)
    layout = _common_layout(sample, columns)
    if layout is not None:
        return _foreign_format(layout, sample, columns, kind)
    if "score" in columns.parts:
        return _rated_format(sample, columns)
    if "better" in columns.parts:
        raise DataError("columns.better: this file has none of the layouts in which several preferences stand")
    rows = [columns.applied(row) for row in sample]
    votes = Counter(fmt for row in rows if (fmt := _format_of(row, is_bare_fine=kind == "prompts")) is not None)
    if not votes:
        raise DataError(_unknown(rows))
    ranked = votes.most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        listed = " and ".join(f"{count} × {fmt}" for fmt, count in ranked)
        raise DataError(f"the first rows have two formats in equal number: {listed}. Put each into a file of its own.")
    fmt = replace(ranked[0][0], is_strict=is_strict and kind != "prompts")
    _refuse_unread(rows, fmt, columns)
    return fmt


def _common_layout(sample: Sequence[Mapping[str, Any]], columns: Columns) -> Layout | None:
    """The foreign layout of more than half of the rows, unless columns are named that are not its own."""
    layouts = Counter(
        layout.name for row in sample if (layout := layout_of(columns.without(columns.parts).applied(row)))
    )
    (name, count), *_ = [*layouts.most_common(1), ("", 0)]
    layout = next((one for row in sample if (one := layout_of(row)) and one.name == name), None)
    is_own = layout is not None and columns.parts.keys() <= layout.choices.keys()
    return layout if is_own and 2 * count > len(sample) else None


def _foreign_format(layout: Layout, sample: Sequence[Mapping[str, Any]], columns: Columns, kind: Kind | None) -> Format:
    for part, name in columns.parts.items():
        if name not in layout.choices[part]:
            known = ", ".join(layout.choices[part])
            hint = did_you_mean(name, layout.choices[part])
            raise DataError(f"columns.{part}: {layout.name} has no '{name}'{hint}; one of {known}")
    pick = dict(columns.parts)
    if kind == "prompts":
        pick = {
            part: next((n for n in names if n in sample[0]), names[0]) for part, names in layout.choices.items()
        } | pick
    own = {name: name for name in layout.has}
    fmt = Format(name=layout.name, kind=layout.kind, columns=own, layout=layout, pick=pick, is_strict=kind != "prompts")
    if layout.key is None:
        _refuse_undecided(fmt, sample, columns)
    return fmt


def _refuse_undecided(fmt: Format, sample: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """A layout with several judgements must be told which one counts before anything is read."""
    if fmt.layout is None or not fmt.layout.choices or fmt.pick:
        return
    for row in sample:
        if layout_of(row) == fmt.layout:
            rewritten(fmt.layout, [columns.without(columns.parts).applied(row)], fmt.pick)


def _rated_format(sample: Sequence[Mapping[str, Any]], columns: Columns) -> Format:
    shape = _BY_NAME["completions"]
    found = next((names for row in sample if (names := _columns(columns.applied(row), shape)) is not None), None)
    if found is None:
        raise DataError(
            "columns.score: there must be a prompt and an answer beside it: columns: {prompt: …, completion: …}"
        )
    read = {**found, "score": "score"}
    return Format(name=RATED.name, kind=RATED.kind, columns=read, layout=RATED)


def _refuse_unread(rows: Sequence[Mapping[str, Any]], fmt: Format, columns: Columns) -> None:
    unused = [part for part in columns.parts if part not in fmt.columns and part not in OPTIONAL]
    if unused:
        raise DataError(
            f"columns.{unused[0]}: with these columns the rows are {fmt.kind} ({', '.join(fmt.columns)}), which have "
            f"no '{unused[0]}'; {_closest(rows[0], but=fmt.name)}"
        )
    if fmt.is_strict:
        for row in rows:
            if has_columns(row, fmt) and (problem := refusal(row, _read_by(fmt), fmt.kind)):
                raise DataError(problem)
    if fmt.kind == "thumbs":
        numbers = {
            row.get(fmt.columns["label"]) for row in rows if isinstance(row.get(fmt.columns["label"]), int | float)
        }
        if {-1, 0} <= numbers:
            raise DataError(
                f"'{fmt.columns['label']}' has -1 and 0 beside 1: three verdicts. Leave out the rows without one."
            )


def _read_by(fmt: Format) -> frozenset[str]:
    return frozenset(fmt.columns.values()) | OPTIONAL


def has_columns(fields: Mapping[str, Any], fmt: Format) -> bool:
    """Whether a row has all columns of the format."""
    return all(fields.get(name) is not None for name in fmt.columns.values())


def parse_canonical(row: Mapping[str, Any], name: str, origin: Origin) -> Example:
    """A row that a foreign layout was turned into, in the format called `name`."""
    shape = _BY_NAME[name]
    columns = {
        need.part: next((name for name in need.names if row.get(name) is not None), need.names[0])
        for need in shape.needs
    }
    return parse(row, Format(name=name, kind=shape.kind, columns=columns, is_strict=False), origin)


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
        if name is None or not _fits(need, name, row[name]):
            return None
        columns[need.part] = name
    return columns


def _fits(need: _Need, name: str, value: Any) -> bool:
    return need.fits(value) and (name not in _SCALES or is_word_label(value))


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


def _closest(row: Mapping[str, Any], *, but: str = "") -> str:
    """The format that the first row comes closest to, and what it lacks of it; `but` is one that is out of question."""

    def present(shape: _Shape) -> int:
        return sum(any(row.get(name) is not None for name in need.names) for need in shape.needs)

    shape = max((shape for shape in _SHAPES if shape.name != but), key=present)
    if present(shape) == 0:
        return ""
    lacks: list[str] = []
    for need in shape.needs:
        name = next((name for name in need.names if row.get(name) is not None), None)
        if name is None:
            lacks.append(f"'{need.part}' is missing")
        elif not _fits(need, name, row[name]):
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
        if not _fits(need, name, value):
            raise DataError(f"field '{name}' is {shown(value)}; it must be {need.wants}")
    if fmt.is_strict and (problem := refusal(fields, _read_by(fmt), fmt.kind)):
        raise DataError(problem)
    return shape.build(Fields(fields, fmt.columns, origin))
