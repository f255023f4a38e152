"""How often a lineage has looked at an exam, and which items are kept for the verdict that a promotion asks for.

Whoever chooses the best of many candidates by the same items finds luck among them. So every candidate of a lineage
that an exam decided about counts as one look, however often its verdict is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from kedge.gate.chain import append_chain

Part = Literal["all", "open", "reserved"]
"""Which items a verdict reads: all of them; those that are not kept back; those that are."""
MANY_LOOKS = 20
"""From so many on it is said."""


def is_reserved(exam: str, cluster: str, reserve: float) -> bool:
    """Whether an item is kept back, by a hash of its name: items of one cluster stay together.

    >>> sum(is_reserved("mmlu", str(item), 0.5) for item in range(10_000))
    4987
    """
    digest = blake2b(f"{exam}\0{cluster}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < reserve * 2**64


def is_in(part: Part, exam: str, cluster: str, reserve: float) -> bool:
    return part == "all" or is_reserved(exam, cluster, reserve) == (part == "reserved")


def count_looks(ledger: Path, *, lineage: str, candidate: str, exams: Mapping[str, str], part: Part) -> dict[str, int]:
    """Note that these exams (name to items_hash) have decided about a candidate; gives the looks of each so far."""
    counts: dict[str, int] = {}
    for exam, items_hash in exams.items():
        look = {"lineage": lineage, "exam": exam, "items_hash": items_hash, "part": part, "candidate": candidate}

        def note(lines: Iterable[Mapping[str, Any]], look: dict[str, str] = look) -> dict[str, str] | None:
            alike = [line for line in lines if all(line[key] == look[key] for key in _SAME)]
            counts[look["exam"]] = len({line["candidate"] for line in alike} | {look["candidate"]})
            is_counted = any(line["candidate"] == look["candidate"] for line in alike)
            return None if is_counted else {**look, "at": datetime.now(UTC).isoformat(timespec="seconds")}

        append_chain(ledger, note)
    return counts


_SAME = ("lineage", "exam", "items_hash", "part")
