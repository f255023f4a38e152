"""Accuracy by bins of about equal size: by margin of the data, by margin of the scores, by length gap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kedge.report.reward.intervals import Share, share
from kedge.report.reward.records import Columns, Floats, Ints

_BINS = 6
_BINS_A_SIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The pairs from `low` to `high`, both of which occur, and the accuracy on them."""

    low: float
    high: float
    median: float
    accuracy: Share


def quantile_groups(x_B: Floats, count: int) -> list[Ints]:
    """Row numbers in at most `count` groups of about equal size, by rising x; equal numbers stay together.

    >>> [rows.tolist() for rows in quantile_groups(np.array([5.0, 1.0, 5.0, 2.0, 5.0, 4.0]), 2)]
    [[1, 3, 5], [0, 2, 4]]
    >>> [rows.tolist() for rows in quantile_groups(np.array([3.0, 1.0, 3.0, 3.0, 3.0]), 4)]
    [[1], [0, 2, 3, 4]]
    """
    values = np.unique(x_B)
    few = len(values) <= count
    edges = values[:-1] if few else np.unique(np.quantile(x_B, np.linspace(0, 1, count + 1)[1:-1]))
    place_B = np.searchsorted(edges, x_B, side="left")
    return [np.flatnonzero(place_B == place) for place in np.unique(place_B)]


def by_data_margin(data: Columns) -> tuple[Bin, ...]:
    """By strength of the preference, over the pairs that have one."""
    given = np.flatnonzero(~np.isnan(data.margin_B))
    return _binned(data, data.margin_B, [given[rows] for rows in quantile_groups(data.margin_B[given], _BINS)])


def by_score_margin(data: Columns) -> tuple[Bin, ...]:
    """By how far apart the two scores are, whichever is higher: a model that knows what it knows rises here."""
    apart_B = np.abs(data.difference_B)
    return _binned(data, apart_B, quantile_groups(apart_B, _BINS))


def by_length_gap(data: Columns) -> tuple[Bin, ...]:
    """By tokens of the chosen answer minus those of the rejected one; no bin crosses zero."""
    groups: list[Ints] = []
    for sign in (-1, 0, 1):
        rows = np.flatnonzero(np.sign(data.gap_B) == sign)
        groups += [rows[inner] for inner in quantile_groups(data.gap_B[rows], _BINS_A_SIDE)]
    return _binned(data, data.gap_B, groups)


def _binned(data: Columns, x_B: Floats, groups: list[Ints]) -> tuple[Bin, ...]:
    return tuple(
        Bin(
            low=float(x_B[rows].min()),
            high=float(x_B[rows].max()),
            median=float(np.median(x_B[rows])),
            accuracy=share(data.correct_B[rows], data.prompt_B[rows]),
        )
        for rows in groups
    )
