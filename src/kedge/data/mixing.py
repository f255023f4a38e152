"""Several files as one, each with its share; or one, with as much of each value of a field.

Without weights every example stands in it once. With weights the shares are theirs, and every example still stands in
it at least once: a file that falls short of its share is repeated. Prompts are not repeated: they carry their share as
`mixture`, and an RL stage draws every batch by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kedge.core.errors import DataError
from kedge.core.seeds import seed_for
from kedge.core.suggest import did_you_mean
from kedge.data.converting import to_fields
from kedge.data.examples import Example, Kind
from kedge.data.reading import Reading, read
from kedge.data.sources import SET_ASIDE_SUFFIX
from kedge.data.writing import row_writer

MIXTURE = "mixture"
"""The field of a prompt that says which file it is from, and the share of that file in a batch."""
MOST_VALUES = 64
NO_VALUE = "(none)"
"""The group of the records that do not have the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a mixture and how it is read."""

    source: str
    columns: Mapping[str, Any] | None = None
    limit: int | None = None
    weight: float | None = None


def mix(parts: Sequence[Part], out: Path, *, kind: Kind | None, seed: int) -> None:
    """Write the examples of all parts to `out`; all must hold the same kind, or serve as `kind`."""
    readings = [_reading(part, kind, out, number) for number, part in enumerate(parts)]
    kinds = {reading.kind for reading in readings}
    if len(kinds) > 1:
        listed = ", ".join(f"{reading.source} holds {reading.kind}" for reading in readings)
        raise DataError(f"files that are mixed must hold the same kind of examples: {listed}")
    shares = _shares(parts)
    copies = _copies(readings, shares, seed) if kinds != {"prompts"} else [(1, frozenset[int]())] * len(parts)
    with row_writer(out) as write:
        for number, (reading, (times, again)) in enumerate(zip(readings, copies, strict=True)):
            mark = {MIXTURE: {"part": number, "share": shares[number]}} if kinds == {"prompts"} and shares else {}
            for example in chain(*(iter(reading) for _ in range(times)), _selected(reading, again)):
                fields = to_fields(example)
                write({**fields, **mark})


def _reading(part: Part, kind: Kind | None, out: Path, number: int) -> Reading:
    aside = out.with_name(f"{out.stem}-{number}{SET_ASIDE_SUFFIX}")
    return read(part.source, kind=kind, columns=part.columns, limit=part.limit, set_aside=aside)


def _shares(parts: Sequence[Part]) -> list[float]:
    """The weights as shares of 1; none where there are no weights."""
    weights = [part.weight for part in parts if part.weight is not None]
    return [weight / sum(weights) for weight in weights]


def even_copies(values: Sequence[str], seed: int) -> list[int]:
    """How often each example is written so that every value has as many as the most frequent one.

    >>> even_copies(["de", "en", "en", "en"], seed=0), sorted(even_copies(["de", "de", "en", "en", "en"], seed=0))
    ([3, 1, 1, 1], [1, 1, 1, 1, 2])
    """
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    most = max(map(len, rows.values()))
    copies = [0] * len(values)
    for value, own in rows.items():
        times, again = _whole_and_rest(most, len(own), seed_for(seed, f"balance/{value}"))
        for number, row in enumerate(own):
            copies[row] = times + (number in again)
    return copies


def even_marks(values: Sequence[str]) -> list[dict[str, Any]]:
    """For prompts, which are not repeated: the mark by which an RL stage draws every value equally often."""
    numbers = {value: number for number, value in enumerate(sorted(set(values)))}
    return [{MIXTURE: {"part": numbers[value], "share": 1 / len(numbers)}} for value in values]


def _copies(readings: Sequence[Reading], shares: Sequence[float], seed: int) -> list[tuple[int, frozenset[int]]]:
    """How often each file is written as a whole, and which of its examples once more."""
    if not shares:
        return [(1, frozenset())] * len(readings)
    counts = [sum(1 for _ in reading) for reading in readings]
    for reading, count in zip(readings, counts, strict=True):
        if not count:
            raise DataError(f"{reading.source}: no examples in it to give a share to")
    total = max(count / share for count, share in zip(counts, shares, strict=True))
    return [
        _whole_and_rest(round(total * share), count, seed_for(seed, "mixture", number))
        for number, (count, share) in enumerate(zip(counts, shares, strict=True))
    ]


def _whole_and_rest(wanted: int, count: int, seed: int) -> tuple[int, frozenset[int]]:
    times, rest = divmod(wanted, count)
    drawn = np.random.default_rng(seed).choice(count, size=rest, replace=False)
    return times, frozenset(int(index) for index in drawn)


def _selected(reading: Reading, indices: frozenset[int]) -> Iterator[Example]:
    if indices:
        yield from (example for index, example in enumerate(reading) if index in indices)


def group_value(record: Mapping[str, Any], field: str) -> str:
    """The value of a field as text.

    >>> group_value({"language": "de"}, "language"), group_value({"language": None}, "language")
    ('de', '(none)')
    """
    value = record.get(field)
    return NO_VALUE if value is None else str(value)


def group_values(records: Sequence[Mapping[str, Any]], field: str, *, setting: str) -> list[str]:
    """The value of a field in each record; a field that none has, or with too many values, is an error of the setting.

    >>> group_values([{"language": "de"}, {}, {"language": "en"}], "language", setting="groups")
    ['de', '(none)', 'en']
    """
    values = [group_value(record, field) for record in records]
    check_values(values, field, known=sorted({name for record in records for name in record}), setting=setting)
    return values


def check_values(values: Sequence[str], field: str, *, known: Sequence[str], setting: str) -> None:
    """`known` are the fields that records have."""
    distinct = set(values)
    if distinct == {NO_VALUE}:
        have = f"they have {', '.join(known)}" if known else "they have no fields of their own"
        raise DataError(f"{setting}: no example has a field '{field}'{did_you_mean(field, known)}; {have}")
    if len(distinct) > MOST_VALUES:
        raise DataError(
            f"{setting}: '{field}' has {len(distinct):,} values, and at most {MOST_VALUES} are told apart; name another"
        )
