"""Near duplicates: candidates by sorted MinHash bands, checked by their exact Jaccard similarity, joined to clusters.

What is reported is exact; what is missed: under 2 % of the pairs right at the threshold, and pairs in crowds (more
than `_NEIGHBOURS` texts that share a band) that no chain of neighbours connects.
"""

from __future__ import annotations

import numpy as np

from kedge.data.auditing.minhash import PERMUTATIONS, Rows, Sketched, jaccard
from kedge.data.auditing.shingles import U32, U64

_RECALL = 0.99
_NEIGHBOURS = 32
_CHUNK_ROWS = 1 << 14
_ESTIMATE_MARGIN = 0.12  # the estimate's standard error is under 0.046: hardly a true pair is turned away unseen


def rows_per_band(threshold: float) -> int:
    """The most selective band that still catches 99 % of the pairs exactly at the threshold.

    With r rows in each of 120 / r bands a pair of similarity s meets in at least one with 1 − (1 − s^r)^(120/r).

    >>> rows_per_band(0.8), rows_per_band(0.5)
    (6, 3)
    """
    for rows in (12, 10, 8, 6, 5, 4, 3):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= _RECALL:
            return rows
    return 2


def clusters(texts: Sketched, threshold: float) -> Rows:
    """A label for each text: the first of its cluster. Texts as similar as `threshold` or more are joined."""
    labels = np.arange(len(texts), dtype=np.int64)
    rows = rows_per_band(threshold)
    for band in range(PERMUTATIONS // rows):
        hashes = _band(texts.signatures, band, rows)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        for offset in range(1, _NEIGHBOURS + 1):
            is_same = hashes[offset:] == hashes[:-offset]
            if not is_same.any():
                break
            left, right = order[:-offset][is_same], order[offset:][is_same]
            is_new = labels[left] != labels[right]
            left, right = left[is_new], right[is_new]
            is_near = _is_near(texts, left, texts, right, threshold)
            labels = _joined(labels, left[is_near], right[is_near])
    return labels


def matches(queries: Sketched, query_rows: Rows, base: Sketched, threshold: float) -> Rows:
    """For each of these rows of the queries a row of the base that is as similar as `threshold` or more, or −1."""
    match = np.full(len(query_rows), -1, dtype=np.int64)
    rows = rows_per_band(threshold)
    for band in range(PERMUTATIONS // rows):
        hashes = _band(base.signatures, band, rows)
        order = np.argsort(hashes, kind="stable")
        query_hashes = _band(queries.signatures, band, rows)[query_rows]
        first = np.searchsorted(hashes, query_hashes, side="left", sorter=order)
        last = np.searchsorted(hashes, query_hashes, side="right", sorter=order)
        for offset in range(_NEIGHBOURS):
            unmatched = np.flatnonzero((first + offset < last) & (match < 0))
            if not len(unmatched):
                break
            candidates = order[first[unmatched] + offset]
            is_near = _is_near(queries, query_rows[unmatched], base, candidates, threshold)
            match[unmatched[is_near]] = candidates[is_near]
    return match


def _is_near(left: Sketched, left_rows: Rows, right: Sketched, right_rows: Rows, threshold: float) -> Rows:
    """Positions of the pairs that pass: first by the cheap estimate, then for certain."""
    agreeing = np.empty(len(left_rows), dtype=np.int64)
    for start in range(0, len(left_rows), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        agreeing[part] = (left.signatures[left_rows[part]] == right.signatures[right_rows[part]]).sum(axis=1)
    likely = np.flatnonzero(agreeing >= (threshold - _ESTIMATE_MARGIN) * PERMUTATIONS)
    return likely[jaccard(left, left_rows[likely], right, right_rows[likely]) >= threshold]


def _band(matrix: U32, band: int, rows: int) -> U64:
    """One hash a row over the band's columns; equal bands are candidates."""
    result = np.zeros(len(matrix), dtype=np.uint64)
    for start in range(0, len(matrix), _CHUNK_ROWS):
        part = result[start : start + _CHUNK_ROWS]
        for column in matrix[start : start + _CHUNK_ROWS, band * rows : (band + 1) * rows].T:
            part ^= column
            part *= np.uint64(0x9E3779B97F4A7C15)
            part ^= part >> np.uint64(29)
    return result


def _joined(labels: Rows, left: Rows, right: Rows) -> Rows:
    """Labels after joining the clusters of `left[i]` and `right[i]`; a label is always the smallest row."""
    while True:
        left_labels, right_labels = labels[left], labels[right]
        if np.array_equal(left_labels, right_labels):
            return labels
        np.minimum.at(labels, np.maximum(left_labels, right_labels), np.minimum(left_labels, right_labels))
        while not np.array_equal(labels, shorter := labels[labels]):
            labels = shorter
