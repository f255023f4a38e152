"""What only shows between files: leakage into held-out data, overlap with evaluation, shared and clashing items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.data.audit.lengths import column
from kedge.data.audit.neighbours import matches
from kedge.data.audit.ngrams import EvaluationGrams, Overlap
from kedge.data.audit.rules import EXAMPLES_PER_FINDING, judge
from kedge.data.audit.scan import Scan
from kedge.data.audit.shingles import U64
from kedge.data.audit.single_file import Case, Place, case

Directions = Mapping[str, NDArray[Any]]


def leakage(train: Sequence[Scan], heldout: Sequence[Scan], *, threshold: float) -> Iterator[Case]:
    """Held-out prompts that training has seen: the same ones, then those that are nearly the same."""
    known = _prompts_of(train)
    for scan in heldout:
        is_known = np.isin(column(scan.prompt_keys), known)
        rows = np.flatnonzero(is_known)
        places = [
            Place(scan=scan, row=int(row), also=_first_with(train, scan.prompt_keys[row]))
            for row in rows[:EXAMPLES_PER_FINDING]
        ]
        prompts = len(np.unique(column(scan.prompt_keys)[rows]))
        detail = f" ({prompts:,} distinct prompts)"
        evidence = {"prompts": prompts}
        yield case(
            "leakage.exact", scan, places, count=len(rows), total=len(is_known), detail=detail, evidence=evidence
        )
        yield _near_leakage(train, scan, is_known, threshold)


def _near_leakage(train: Sequence[Scan], scan: Scan, is_known: NDArray[np.bool_], threshold: float) -> Case:
    first_rows = column(scan.prompts.rows)
    is_new = ~is_known[first_rows] if len(first_rows) else np.empty(0, dtype=bool)
    asked, queries = np.flatnonzero(is_new), scan.prompts.sketches.sketched()
    also = dict[int, str]()
    for other in train:
        found = matches(queries, asked, other.prompts.sketches.sketched(), threshold)
        for index in np.flatnonzero(found >= 0).tolist():
            also.setdefault(int(asked[index]), other.where(other.prompts.rows[found[index]]))
    places = [Place(scan=scan, row=int(first_rows[index]), also=also[index]) for index in sorted(also)]
    detail = f" (Jaccard similarity of at least {threshold:g})"
    return case("leakage.near", scan, places, count=len(also), total=len(first_rows), detail=detail)


def contamination(
    train: Sequence[tuple[Scan, Overlap]], evaluation: Sequence[tuple[Scan, int]], grams: EvaluationGrams
) -> Iterator[Case]:
    """Overlap of training with evaluation files; an evaluation scan comes with the number of its first prompt."""
    known = _prompts_of([scan for scan, _ in train])
    is_hit = np.zeros(len(grams.grams), dtype=bool)
    for scan, overlap in train:
        rows = overlap.items()
        is_hit |= overlap.is_hit
        places = [Place(scan=scan, row=int(row)) for row in rows[:EXAMPLES_PER_FINDING]]
        yield case("contamination.items", scan, places, count=len(rows), total=len(scan.lines))
    touched = grams.prompts_with(is_hit)
    for scan, first in evaluation:
        rows = column(scan.prompts.rows)
        shared = rows[np.isin(column(scan.prompt_keys)[rows], known)]
        places = [
            Place(scan=scan, row=int(row), also=_first_with([item for item, _ in train], scan.prompt_keys[row]))
            for row in shared[:EXAMPLES_PER_FINDING]
        ]
        yield case("contamination.prompts", scan, places, count=len(shared), total=len(rows))
        own = touched[(touched >= first) & (touched < first + len(rows))] - first
        places = [Place(scan=scan, row=int(rows[index])) for index in own[:EXAMPLES_PER_FINDING]]
        evidence = {"boilerplate_ignored": grams.boilerplate_count}
        yield case("contamination.ngrams", scan, places, count=len(own), total=len(rows), evidence=evidence)


def between(train: Sequence[Scan]) -> Iterator[Case]:
    """What two training files have in common, and where they disagree."""
    for one, other in combinations(train, 2):
        file = f"{one.source} and {other.source}"
        detail = f" ({file})"
        for code, mine, theirs in (
            ("files.shared_prompts", one.prompt_keys, other.prompt_keys),
            ("files.shared_items", one.item_keys, other.item_keys),
        ):
            if code == "files.shared_items" and one.kind != other.kind:
                continue
            here, there = np.unique(column(mine)), np.unique(column(theirs))
            shared = np.intersect1d(here, there, assume_unique=True)
            is_shared = np.isin(column(mine), shared)
            rows = np.flatnonzero(is_shared)[:EXAMPLES_PER_FINDING]
            places = tuple(
                Place(scan=one, row=int(row), also=other.where(int(np.flatnonzero(column(theirs) == mine[row])[0])))
                for row in rows
            )
            where = [one.where(place.row) for place in places]
            total = min(len(here), len(there))
            finding = judge(code, count=len(shared), total=total, places=where, file=file, detail=detail)
            yield Case(finding=finding, places=places)
        if one.pair_keys and other.pair_keys and (one.kind == "thumbs") == (other.kind == "thumbs"):
            yield _clashes(one, other, file)


def _clashes(one: Scan, other: Scan, file: str) -> Case:
    """Pairs that both files hold, labelled differently."""
    mine, theirs = _directions(one), _directions(other)
    shared, at, there = np.intersect1d(mine["keys"], theirs["keys"], assume_unique=True, return_indices=True)
    agree = (
        (mine["low"][at] == mine["high"][at])
        & (mine["low"][at] == theirs["low"][there])
        & (theirs["low"][there] == theirs["high"][there])
    )
    clashing = np.flatnonzero(~agree)
    firsts = sorted(
        (int(one.pair_rows[int(mine["first"][at[index]])]), int(other.pair_rows[int(theirs["first"][there[index]])]))
        for index in clashing
    )
    places = tuple(
        Place(scan=one, row=row, also=other.where(their_row)) for row, their_row in firsts[:EXAMPLES_PER_FINDING]
    )
    where = [one.where(place.row) for place in places]
    finding = judge(
        "files.contradictory", count=len(clashing), total=len(shared), places=where, file=file, detail=f" ({file})"
    )
    return Case(finding=finding, places=places)


def _directions(scan: Scan) -> Directions:
    """The distinct pairs of a file with the smallest and largest of their labels."""
    keys, first, at = np.unique(column(scan.pair_keys), return_index=True, return_inverse=True)
    low, high = np.ones(len(keys), dtype=np.int8), np.zeros(len(keys), dtype=np.int8)
    np.minimum.at(low, at, column(scan.pair_directions))
    np.maximum.at(high, at, column(scan.pair_directions))
    return {"keys": keys, "first": first, "low": low, "high": high}


def _prompts_of(scans: Sequence[Scan]) -> U64:
    parts = [np.unique(column(scan.prompt_keys)) for scan in scans]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.uint64)


def _first_with(scans: Sequence[Scan], key: int) -> str:
    for scan in scans:
        rows = np.flatnonzero(column(scan.prompt_keys) == np.uint64(key))
        if len(rows):
            return scan.where(int(rows[0]))
    raise AssertionError("a shared prompt is in none of the files")
