"""Lines of `evaluation_truth.py`: what is accepted, what was found, and whether that is the same."""

from __future__ import annotations

import gzip
import json
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
