"""Conversion of any readable file to the canonical form of a kind, and an example as a row of that form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import DataError
from kedge.core.files import refuse_overwriting
from kedge.data.columns import NO_COLUMNS, Columns
from kedge.data.decode import Row
from kedge.data.examples import Demonstration, Example, Kind, Message, Messages, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.foreign.unread import is_suspicious
from kedge.data.formats import KNOWN_FIELDS, Format, recognise
from kedge.data.kinds import CONVERTS, SERVES, as_kind, kind_of
from kedge.data.reading import MAX_BROKEN, SAMPLE_ROWS, Reading, examples_of, grouped, recognised
from kedge.data.sources import SET_ASIDE_SUFFIX, stem_of
from kedge.data.writing import encode, row_writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The counts of a conversion. `num_without` rows held no example of the kind, such as disliked answers."""

    out: Path
    format: Format
    kind: Kind
    num_rows: int
    num_examples: int
    num_without: int
    num_broken: int


def convert(
    source: str | Path,
    out: Path,
    *,
    kind: Kind | None = None,
    max_broken: float = MAX_BROKEN,
    set_aside: Path | None = None,
    columns: Mapping[str, Any] | None = None,
    limit: int | None = None,
    force: bool = False,
) -> Converted:
    """Write the examples of `source` to `out` (.jsonl, .jsonl.gz or .parquet) as examples of `kind`.

    Broken rows go to `set_aside`, by default a file beside `out`. With too many of them nothing else is written. A file
    that is there is overwritten with `force` only, and the source never.
    """
    aside = set_aside or out.with_name(stem_of(out) + SET_ASIDE_SUFFIX)
    refuse_overwriting([out], inputs=[source], force=force)
    refuse_overwriting([out, aside], inputs=[source], force=True)  # what an earlier try set aside is replaced
    fmt = recognised(source, kind, columns=columns)
    kind = kind or fmt.kind
    if kind != fmt.kind and kind not in CONVERTS[fmt.kind]:
        possible = ", ".join(CONVERTS[fmt.kind])
        raise DataError(f"{source}: holds {fmt.kind}, which cannot be turned into {kind}; they can become: {possible}")
    named = Columns.parse(columns)
    reading = Reading(source, fmt, kind, max_broken=max_broken, set_aside=aside, columns=named, limit=limit)
    with row_writer(out) as write:
        for _, examples in reading.by_row():
            for example in examples:
                write(to_fields(example))
    return Converted(
        out=out,
        format=fmt,
        kind=kind,
        num_rows=reading.num_rows,
        num_examples=reading.count,
        num_without=reading.num_without,
        num_broken=reading.num_broken,
    )


def canonical_lines(rows: Iterable[object], kinds: Sequence[Kind], *, name: str) -> list[bytes]:
    """Rows that a program holds as the lines of a canonical file of one of `kinds`; of any kind where none is given.

    Rows are mappings of fields, where a null is an absent field; lists of messages; or, for prompts, plain text.
    Unlike in a file, one broken row is an error: whoever made it can mend it. `name` is what messages call the rows.
    """
    fields = list(_fields_of(rows, are_prompts=tuple(kinds) == ("prompts",), name=name))
    if not fields:
        raise DataError(f"{name}: there are no rows in it")
    try:
        fmt = recognise(fields[:SAMPLE_ROWS], kind=kinds[0] if len(kinds) == 1 else None)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    possible: Sequence[Kind] = kinds or (fmt.kind,)
    kind: Kind | None = (
        fmt.kind if fmt.kind in possible else next((kind for kind in possible if kind in SERVES[fmt.kind]), None)
    )
    if kind is None:
        columns = ", ".join(fmt.columns.values())
        raise DataError(f"{name}: holds {fmt.kind}, recognised by {columns}; {' or '.join(possible)} are needed here")
    rows_in = (Row(Origin(name, number), row) for number, row in enumerate(fields))
    lines: list[bytes] = []
    for row, group in grouped(rows_in, fmt, NO_COLUMNS):
        try:
            examples = (one for example in examples_of(group, fmt, row.origin) for one in as_kind(example, kind))
            lines.extend(encode(to_fields(example)) + b"\n" for example in examples)
        except (DataError, TypeError) as error:  # what JSON cannot hold is a TypeError
            raise DataError(f"{name}[{row.origin.line}]: {error}") from error
    return lines


def _fields_of(rows: Iterable[object], *, are_prompts: bool, name: str) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            fields = cast("Mapping[Any, Any]", row).items()
            yield {str(field): value for field, value in fields if value is not None}
        elif isinstance(row, list) or (are_prompts and isinstance(row, str)):
            yield {"prompt" if are_prompts else "messages": row}
        else:
            wanted = "text or a dict of fields" if are_prompts else "a dict of fields"
            raise DataError(f"{name}[{number}]: expected {wanted}, found {row!r:.80} ({type(row).__name__})")


def to_fields(example: Example) -> dict[str, Any]:
    """The canonical row of an example, which reads back as the same example.

    Extra fields stand beside the others, except those whose names a reader would take for its own: they go into one
    field `extra`.
    """
    kind = kind_of(example)
    taken = {name: value for name, value in example.extra.items() if name in KNOWN_FIELDS or is_suspicious(name, kind)}
    free = {name: value for name, value in example.extra.items() if name not in taken}
    return _own_fields(example) | free | ({"extra": taken} if taken else {})


def _own_fields(example: Example) -> dict[str, Any]:
    match example:
        case Pair(margin=margin, certainty=certainty):
            pair = {part: _plain(getattr(example, part)) for part in ("prompt", "chosen", "rejected")}
            strength = {"margin": margin, "certainty": certainty}
            return pair | {name: value for name, value in strength.items() if value is not None}
        case Ranking(prompt=prompt, answers=answers, rank=rank):
            return {"prompt": _plain(prompt), "answers": [_plain(answer) for answer in answers], "rank": list(rank)}
        case Thumb(prompt=prompt, answer=answer, is_good=is_good):
            return {"prompt": _plain(prompt), "completion": _plain(answer), "label": is_good}
        case Demonstration(messages=(Message(role="text", content=text),)):
            return {"text": text}
        case Demonstration(messages=messages):
            return {"messages": _plain(messages)}
        case Prompt(prompt=prompt, answer=answer):
            return {"prompt": _plain(prompt)} | ({} if answer is None else {"answer": answer})


def _plain(messages: Messages) -> list[dict[str, Any]]:
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> dict[str, Any]:
    weight = {} if message.is_trained else {"weight": 0}
    return {"role": message.role, "content": message.content, **weight, **(message.detail or {})}
