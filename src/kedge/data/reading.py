"""Reading a source of data: examples come out one at a time, and none is dropped in silence.

A broken row is set aside with its line and the reason; too many of them are an error.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import orjson
import xxhash

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import atomic_open, is_same_file, sweep_partial_files
from kedge.data.columns import NO_COLUMNS, Columns
from kedge.data.examples import Demonstration, Example, Kind, Origin, prompt_of
from kedge.data.foreign.table import RATED, rewritten
from kedge.data.formats import Format, has_columns, parse, parse_canonical, recognise
from kedge.data.kinds import CONVERTS, SERVES, as_kind
from kedge.data.sources import Row, rows
from kedge.data.writing import encode

MAX_BROKEN = 0.01
SAMPLE_ROWS = 100
"""Rows by which a format is recognised."""
_LISTED_BROKEN = 20
_HOPELESS_AFTER = 1000


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that is not an example: where it is, the reason, and its text."""

    origin: Origin
    reason: str
    raw: str


class Reading:
    """The examples of one source, read anew at each iteration; the counts are those of the last one.

    `broken` lists the first few broken rows, `num_broken` counts all, `count` the examples that were given out,
    `num_without` the rows that hold none (a tie prefers nothing). `limit` is the most rows that are read.
    """

    def __init__(
        self,
        source: str | Path,
        fmt: Format,
        kind: Kind,
        *,
        max_broken: float,
        set_aside: Path | None,
        columns: Columns = NO_COLUMNS,
        limit: int | None = None,
    ) -> None:
        if not 0 <= max_broken <= 1:
            raise ConfigError(f"max_broken is {max_broken}; it is a share from 0 to 1")
        # The file of broken rows is replaced: it must not be what is read.
        if set_aside is not None and is_same_file(Path(source), set_aside):
            raise ConfigError(f"{source}: broken rows cannot be set aside into the file that is read; name another")
        self.source = str(source)
        self.format = fmt
        self.kind: Kind = kind
        self.max_broken = max_broken
        self.set_aside = set_aside
        self.columns = columns
        self.limit = limit
        self._reset()

    def _reset(self) -> None:
        self.count = 0
        self.num_rows = 0
        self.num_broken = 0
        self.num_without = 0
        self.broken: list[Broken] = []

    def __iter__(self) -> Iterator[Example]:
        for _, examples in self.by_row():
            yield from examples

    def by_row(self) -> Iterator[tuple[Row, tuple[Example, ...]]]:
        """Each good row with the examples that it holds: usually one."""
        self._reset()
        if self.set_aside is not None:
            self.set_aside.unlink(missing_ok=True)
        with ExitStack() as stack:
            aside: IO[bytes] | None = None
            for row, fields in grouped(rows(self.source), self.format, self.columns):
                if self.limit is not None and self.num_rows - self.num_broken >= self.limit:
                    break
                self.num_rows += 1
                try:
                    examples = self._examples(row, fields)
                except DataError as error:
                    broken = Broken(row.origin, str(error), row.raw or encode(row.fields).decode())
                    if aside is None and self.set_aside is not None:
                        self.set_aside.parent.mkdir(parents=True, exist_ok=True)
                        sweep_partial_files(self.set_aside)
                        aside = stack.enter_context(atomic_open(self.set_aside))
                    self._note(broken, aside)
                    if self._is_hopeless():
                        break
                    continue
                self.count += len(examples)
                self.num_without += not examples
                yield row, examples
        if self.num_broken > self.max_broken * self.num_rows:
            raise DataError(self._too_many())

    def _examples(self, row: Row, group: Sequence[Mapping[str, Any]]) -> tuple[Example, ...]:
        if row.fields is None:
            raise DataError(row.problem)
        examples = examples_of(group, self.format, row.origin)
        return tuple(one for example in examples for one in as_kind(example, self.kind))

    def _note(self, broken: Broken, aside: IO[bytes] | None) -> None:
        self.num_broken += 1
        if len(self.broken) < _LISTED_BROKEN:
            self.broken.append(broken)
        if aside is not None:
            line = {
                "file": broken.origin.file,
                "line": broken.origin.line,
                "reason": broken.reason,
                "raw": broken.raw,
            }
            aside.write(orjson.dumps(line) + b"\n")

    def _is_hopeless(self) -> bool:
        """Whether so many rows are broken that reading on would be a waste of time."""
        limit = max(0.5, self.max_broken)
        return self.num_rows >= _HOPELESS_AFTER and self.num_broken > limit * self.num_rows

    def _too_many(self) -> str:
        share = self.num_broken / self.num_rows
        listed = "\n".join(f"  {broken.origin}: {broken.reason}" for broken in self.broken[:5])
        more = f"\n  … and {self.num_broken - 5} more" if self.num_broken > 5 else ""
        where = f" All are in {self.set_aside}." if self.set_aside is not None else ""
        return (
            f"{self.source}: {self.num_broken} of the {self.num_rows} rows read are broken ({share:.1%}; at most "
            f"{self.max_broken:.1%} may be: max_broken), read as {self.format}.{where}\n{listed}{more}"
        )


def grouped(rows: Iterable[Row], fmt: Format, columns: Columns) -> Iterator[tuple[Row, Sequence[Mapping[str, Any]]]]:
    """Each row with the fields to read, under the names of their parts. A layout whose rows belong together gives all
    rows of one key with the first of them, once the whole file is read; a row that cannot be decoded has no fields."""
    mapped = columns.without(fmt.layout.choices if fmt.layout is not None else ())
    groups: dict[Any, tuple[Row, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row.fields is None:
            yield row, ()
            continue
        fields = mapped.applied(row.fields)
        if fmt.layout is None or fmt.layout.key is None:
            yield row, (fields,)
            continue
        key = (
            fmt.layout.key(_scored(fields, fmt) if fmt.layout is RATED else fields)
            if has_columns(fields, fmt)
            else row.origin
        )
        groups.setdefault(key, (row, []))[1].append(fields)
    yield from groups.values()


def examples_of(group: Sequence[Mapping[str, Any]], fmt: Format, origin: Origin) -> tuple[Example, ...]:
    """The examples that one row, or one group of rows, holds; a DataError says why it holds none."""
    if fmt.layout is None:
        return (parse(group[0], fmt, origin),)
    for fields in group:
        _refuse_incomplete(fields, fmt)
    rows = [_scored(fields, fmt) for fields in group] if fmt.layout is RATED else group
    return tuple(parse_canonical(row, fmt.layout.shape, origin) for row in rewritten(fmt.layout, rows, fmt.pick))


def _refuse_incomplete(fields: Mapping[str, Any], fmt: Format) -> None:
    for name in fmt.columns.values():
        if fields.get(name) is None:
            raise DataError(f"field '{name}' is missing (found: {', '.join(fields) or 'none'})")


def _scored(fields: Mapping[str, Any], fmt: Format) -> dict[str, Any]:
    """A rated answer with its whole prompt as messages, so that answers to the same one are found."""
    read_columns = {part: name for part, name in fmt.columns.items() if part != "score"}
    shape = Format(name="completions", kind="demonstrations", columns=read_columns, is_strict=False)
    answer = cast(Demonstration, parse(fields, shape, Origin("", 0)))
    turns = [{"role": message.role, "content": message.content} for message in answer.messages]
    return {"prompt": turns[:-1], "completion": turns[-1]["content"], "score": fields["score"]}


def read(
    source: str | Path,
    *,
    kind: Kind | None = None,
    max_broken: float = MAX_BROKEN,
    set_aside: Path | None = None,
    columns: Mapping[str, Any] | None = None,
    limit: int | None = None,
    is_strict: bool = True,
) -> Reading:
    """Open a source and recognise its format; examples come when the result is iterated.

    `kind` is what they will be used as: other files may serve as prompts, but nothing else is turned unasked.
    Broken rows go to the file `set_aside`; a share above `max_broken` is a DataError at the end. `columns` says which
    column plays which part (`kedge.data.columns`), `limit` how many rows are read at most. Where it is not `is_strict`,
    a column that looks like a verdict or a second answer may go unread.
    """
    fmt = recognised(source, kind, columns=columns, is_strict=is_strict)
    if kind is not None and kind != fmt.kind and kind not in SERVES[fmt.kind]:
        raise DataError(_wrong_kind(source, fmt, kind))
    named = Columns.parse(columns)
    return Reading(
        source, fmt, kind or fmt.kind, max_broken=max_broken, set_aside=set_aside, columns=named, limit=limit
    )


def load(
    source: str | Path,
    *,
    kind: Kind | None = None,
    max_broken: float = MAX_BROKEN,
    set_aside: Path | None = None,
    columns: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> list[Example]:
    """All examples of a source in a list."""
    reading = read(source, kind=kind, max_broken=max_broken, set_aside=set_aside, columns=columns, limit=limit)
    return list(reading)


def recognised(
    source: str | Path, kind: Kind | None, *, columns: Mapping[str, Any] | None = None, is_strict: bool = True
) -> Format:
    """The format of a source, from its first rows; `kind` is what it will be used as, where that is known."""
    sample = list(islice(rows(source), SAMPLE_ROWS))
    if not sample:
        raise DataError(f"{source}: there are no rows in it")
    good = [row.fields for row in sample if row.fields is not None]
    if not good:
        first = sample[0]
        raise DataError(f"{source}: none of the first {len(sample)} rows can be read. {first.origin}: {first.problem}")
    try:
        return recognise(good, kind=kind, columns=Columns.parse(columns), is_strict=is_strict)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def _wrong_kind(source: str | Path, fmt: Format, kind: Kind) -> str:
    problem = f"{source}: holds {fmt.kind}, recognised by {', '.join(fmt.columns.values())}; {kind} are needed here."
    if kind in CONVERTS[fmt.kind]:
        return f"{problem} To make them: kedge data convert '{source}' --kind {kind}"
    return f"{problem} They cannot be made from {fmt.kind}."


def normalise(text: str) -> str:
    """Text as duplicates and leakage are compared: case, width variants and spacing do not count.

    >>> normalise("  What IS\\n this?")
    'what is this?'
    """
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def prompt_key(example: Example) -> int:
    """A 64-bit hash of the normalised prompt, the same on every machine: a split keeps examples of one key together."""
    text = "\x1e".join(f"{message.role}\x1f{normalise(message.content)}" for message in prompt_of(example))
    return xxhash.xxh3_64_intdigest(text.encode())
