"""Findings across files: leakage into held-out data, overlap with evaluation, shared and contradictory items."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.data.auditing.lengths import column
from kedge.data.auditing.neighbours import matches
from kedge.data.auditing.ngrams import EvaluationGrams, Overlap
from kedge.data.auditing.rules import EXAMPLES_PER_FINDING, make_finding
from kedge.data.auditing.scan import Scan
from kedge.data.auditing.shingles import U64
from kedge.data.auditing.single_file import LocatedFinding, Place, locate

Directions = Mapping[str, NDArray[Any]]


def leakage(train: Sequence[Scan], heldout: Sequence[Scan], *, threshold: float) -> Iterator[LocatedFinding]:
    """Held-out prompts that are also in the training files: word for word, then nearly."""
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
        yield locate(
            "leakage.exact", scan, places, count=len(rows), total=len(is_known), detail=detail, evidence=evidence
        )
        yield _near_leakage(train, scan, is_known, threshold)


def _near_leakage(train: Sequence[Scan], scan: Scan, is_known: NDArray[np.bool_], threshold: float) -> LocatedFinding:
    first_rows = column(scan.prompts.rows)
    is_new = ~is_known[first_rows] if len(first_rows) else np.empty(0, dtype=bool)
    new_prompts, queries = np.flatnonzero(is_new), scan.prompts.sketches.sketched()
    also = dict[int, str]()
    for other in train:
        match = matches(queries, new_prompts, other.prompts.sketches.sketched(), threshold)
        for index in np.flatnonzero(match >= 0).tolist():
            also.setdefault(int(new_prompts[index]), other.where(other.prompts.rows[match[index]]))
    places = [Place(scan=scan, row=int(first_rows[index]), also=also[index]) for index in sorted(also)]
    detail = f" (Jaccard similarity of at least {threshold:g})"
    return locate("leakage.near", scan, places, count=len(also), total=len(first_rows), detail=detail)


def contamination(
    train: Sequence[tuple[Scan, Overlap]], evaluation: Sequence[tuple[Scan, int]], grams: EvaluationGrams
) -> Iterator[LocatedFinding]:
    """Overlap of training with evaluation files; an evaluation scan comes with the number of its first prompt."""
    known = _prompts_of([scan for scan, _ in train])
    is_hit = np.zeros(len(grams.grams), dtype=bool)
    for scan, overlap in train:
        rows = overlap.items()
        is_hit |= overlap.is_hit
        places = [Place(scan=scan, row=int(row)) for row in rows[:EXAMPLES_PER_FINDING]]
        yield locate("contamination.items", scan, places, count=len(rows), total=len(scan.lines))
    touched = grams.prompts_with(is_hit)
    for scan, first in evaluation:
        rows = column(scan.prompts.rows)
        shared = rows[np.isin(column(scan.prompt_keys)[rows], known)]
        places = [
            Place(scan=scan, row=int(row), also=_first_with([item for item, _ in train], scan.prompt_keys[row]))
            for row in shared[:EXAMPLES_PER_FINDING]
        ]
        yield locate("contamination.prompts", scan, places, count=len(shared), total=len(rows))
        own = touched[(touched >= first) & (touched < first + len(rows))] - first
        places = [Place(scan=scan, row=int(rows[index])) for index in own[:EXAMPLES_PER_FINDING]]
        evidence = {"boilerplate_ignored": grams.boilerplate_count}
        yield locate("contamination.ngrams", scan, places, count=len(own), total=len(rows), evidence=evidence)


def between_training_files(train: Sequence[Scan]) -> Iterator[LocatedFinding]:
    """Prompts and items that two training files share, and pairs that they label differently."""
    for left, right in combinations(train, 2):
        file = f"{left.source} and {right.source}"
        yield _shared("files.shared_prompts", left, right, left.prompt_keys, right.prompt_keys, file)
        if left.kind == right.kind:
            yield _shared("files.shared_items", left, right, left.item_keys, right.item_keys, file)
        if left.pair_keys and right.pair_keys and (left.kind == "thumbs") == (right.kind == "thumbs"):
            yield _contradictions(left, right, file)


def _shared(
    code: str, left: Scan, right: Scan, left_keys: array[int], right_keys: array[int], file: str
) -> LocatedFinding:
    """How many distinct keys two files have in common, with the first rows of the left one that do."""
    distinct_left, distinct_right = np.unique(column(left_keys)), np.unique(column(right_keys))
    shared = np.intersect1d(distinct_left, distinct_right, assume_unique=True)
    rows = np.flatnonzero(np.isin(column(left_keys), shared))[:EXAMPLES_PER_FINDING]
    first_right = [int(np.flatnonzero(column(right_keys) == left_keys[row])[0]) for row in rows]
    places = tuple(
        Place(scan=left, row=int(row), also=right.where(other)) for row, other in zip(rows, first_right, strict=True)
    )
    finding = make_finding(
        code,
        count=len(shared),
        total=min(len(distinct_left), len(distinct_right)),
        places=[left.where(place.row) for place in places],
        file=file,
        detail=f" ({file})",
    )
    return LocatedFinding(finding=finding, places=places)


def _contradictions(left: Scan, right: Scan, file: str) -> LocatedFinding:
    """Pairs that both files hold, labelled differently."""
    ours, theirs = _directions(left), _directions(right)
    shared, at, there = np.intersect1d(ours["keys"], theirs["keys"], assume_unique=True, return_indices=True)
    agree = (
        (ours["low"][at] == ours["high"][at])
        & (ours["low"][at] == theirs["low"][there])
        & (theirs["low"][there] == theirs["high"][there])
    )
    clashing = np.flatnonzero(~agree)
    firsts = sorted(
        (int(left.pair_rows[int(ours["first"][at[index]])]), int(right.pair_rows[int(theirs["first"][there[index]])]))
        for index in clashing
    )
    places = tuple(
        Place(scan=left, row=row, also=right.where(their_row)) for row, their_row in firsts[:EXAMPLES_PER_FINDING]
    )
    where = [left.where(place.row) for place in places]
    finding = make_finding(
        "files.contradictory", count=len(clashing), total=len(shared), places=where, file=file, detail=f" ({file})"
    )
    return LocatedFinding(finding=finding, places=places)


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
