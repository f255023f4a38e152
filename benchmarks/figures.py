"""Lines of `evaluation_truth.py` and `label_truth.py`: what is accepted, what was found, and whether it is the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    accepted: str
    found: str
    is_ok: bool | None
    """None: no value is given to compare with."""


def equal(what: str, accepted: float, found: float, *, places: int = 4) -> Figure:
    """A figure that must be the accepted one as far as that is written out."""
    return Figure(what, f"{accepted:.{places}f}", f"{found:.{places}f}", abs(found - accepted) <= 0.5001 * 10**-places)


def same(what: str, accepted: str, found: str) -> Figure:
    return Figure(what, accepted, found, accepted == found)


def at_most(what: str, bound: float, found: float) -> Figure:
    return Figure(what, f"≤ {bound:g}", f"{found:.3g}", found <= bound)


def at_least(what: str, bound: float, found: float) -> Figure:
    return Figure(what, f"≥ {bound:g}", f"{found:.4f}", found >= bound)


def told(what: str, found: str) -> Figure:
    return Figure(what, "–", found, None)


def read(folder: Path, name: str) -> list[Record]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def print_figures(figures: Iterable[Figure]) -> int:
    """A table of all of them; gives how many are missed."""
    words = {True: "ok", False: "MISS", None: ""}
    misses = 0
    print(f"{'figure':<74} {'accepted':<36} {'found':<36}")
    for figure in figures:
        print(f"{figure.what:<74} {figure.accepted:<36} {figure.found:<36} {words[figure.is_ok]}".rstrip(), flush=True)
        misses += figure.is_ok is False
    return misses
