"""`items.jsonl`: one row for each item, metric and model, which is what every statistic of exams and gates reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from kedge.core.errors import ConfigError
from kedge.core.files import atomic_open


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRow:
    exam: str
    metric: str
    item: str
    cluster: str
    """Equal where items are not independent; the item's own name where it stands alone."""
    model: str
    score: float
    answer: str
    """Hash of the answer's text."""
    seed: int
    groups: Mapping[str, str] = field(default_factory=dict[str, str])


def write_rows(file: Path, rows: Iterable[ItemRow]) -> Path:
    with atomic_open(file) as out:
        for row in rows:
            out.write(orjson.dumps(asdict(row)) + b"\n")
    return file


def read_rows(file: Path) -> Iterator[ItemRow]:
    """A line that is no such row is an error with its number: a missing item would change a verdict."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _row(line, f"{file}:{number}")


def _row(line: bytes, where: str) -> ItemRow:
    try:
        fields: dict[str, Any] = orjson.loads(line)
        return ItemRow(**fields)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{where}: not a row of an exam ({error}); make the file again with `kedge exam`") from error
