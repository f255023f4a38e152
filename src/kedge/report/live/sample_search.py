"""The samples of a run, searched: newest first, by words that must all occur in prompt or answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kedge.report.run.records import Record, RunRecord

PAGE_SIZE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One page of what was found; `total` counts all pages."""

    samples: tuple[tuple[str, Record], ...]
    """Stage and sample."""
    total: int
    first: int


def search(run: RunRecord, words: str, *, first: int = 0) -> Found:
    """Small and capital letters are alike."""
    wanted = words.casefold().split()
    found = [
        (stage, sample)
        for stage, sample in _newest_first(run)
        if all(word in f"{sample.get('prompt', '')}\n{sample.get('answer', '')}".casefold() for word in wanted)
    ]
    return Found(samples=tuple(found[first : first + PAGE_SIZE]), total=len(found), first=first)


def _newest_first(run: RunRecord) -> Iterator[tuple[str, Record]]:
    for stage in reversed(run.stages):
        samples: Sequence[Record] = stage.samples
        yield from ((stage.name, sample) for sample in reversed(samples))
