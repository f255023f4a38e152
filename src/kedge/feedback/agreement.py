"""How far people agree on the same items: κ of two people, of many, Krippendorff's α, with intervals.

Every measure here is a function of a table that is a sum over items, so that a bootstrap only adds tables: which pairs
of labels met on one item (`coincidences`), or what one person said where the other said this (two people, Cohen). Where
all labels are the same one, nobody could have disagreed: agreement is 1 then, its limit. Shape letters: N items,
K different labels, G clusters of items, M labels given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import BOOTSTRAP_DRAWS, Floats, bootstrap_rows, percentile_interval, places_of
from kedge.core.stats import cohen_kappa as kappa_of_two
from kedge.feedback.ratings import Labels, Ratings, labels_of

Level = Literal["nominal", "ordinal", "interval"]
Measure = Literal["raw", "cohen", "fleiss", "alpha"]
_LEVELS = ("nominal", "ordinal", "interval")
_MEASURES = ("raw", "cohen", "fleiss", "alpha")
_FEWEST_CLUSTERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementInterval:
    """A measure of agreement and its 95 % interval."""

    value: float
    low: float
    high: float
    items: int
    """With two labels or more: the others say nothing of agreement."""
    clusters: int


def cohen_kappa(a: Sequence[float | None], b: Sequence[float | None]) -> float:
    """(p_o − p_e) / (1 − p_e) of two people, over the items that both labelled (Cohen 1960).

    >>> cohen_kappa([1, 1, 2, 2, None], [1, 2, 2, 2, 1])
    0.5
    """
    if len(a) != len(b):
        raise DataError(f"cohen_kappa needs the same items twice: found {len(a)} labels and {len(b)}")
    both = [(first, second) for first, second in zip(a, b, strict=True) if first is not None and second is not None]
    if not both:
        raise DataError(f"cohen_kappa: none of the {len(a)} items has a label of both people")
    labels_of(both)
    return kappa_of_two([first for first, _ in both], [second for _, second in both])


def raw_agreement(ratings: Ratings) -> float:
    """The probability that another person gave the label that one person gave to the same item: 1 − D_o of α.

    For two people the share of items with equal labels.

    >>> raw_agreement([[1, 1], [1, 2], [2, 2], [2, None]])
    0.6666666666666666
    """
    table_NKK, _ = coincidences(labels_of(ratings))
    return _raw(table_NKK.sum(axis=0))


def fleiss_kappa(ratings: Ratings) -> float:
    """κ of any number of people where all items have equally many labels, not always of the same people (Fleiss 1971).

    >>> round(fleiss_kappa([[0, 0, 0], [0, 0, 1], [1, 1, 1], [1, 1, 0]]), 6)
    0.333333
    """
    labels = labels_of(ratings)
    _refuse_unequal(labels)
    table_NKK, _ = coincidences(labels)
    return _fleiss(table_NKK.sum(axis=0))


def krippendorff_alpha(ratings: Ratings, *, level: Level = "nominal") -> float:
    """α = 1 − D_o / D_e: for any number of people, with labels missing (Krippendorff 2011).

    `nominal` labels are equal or not; `ordinal` ones are as far apart as there are labels between them; `interval` ones
    by the square of their difference. Items with a single label have nobody to agree with and are left out.

    >>> krippendorff_alpha([[0, 0], [0, 1], [1, 1], [None, 0]])
    0.4444444444444444
    """
    table_NKK, values = coincidences(labels_of(ratings))
    return _alpha(level, values)(table_NKK.sum(axis=0))


def agreement_interval(
    ratings: Ratings,
    *,
    measure: Measure = "alpha",
    level: Level = "nominal",
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    draws: int = BOOTSTRAP_DRAWS,
) -> AgreementInterval:
    """A measure with its percentile interval when clusters of items are drawn again, with replacement.

    `clusters` names for each item what it shares with others, its prompt; without it every item is drawn by itself.

    >>> agreement_interval([[0, 0], [1, 1], [0, 0], [1, 1]], clusters=["p", "p", "q", "q"])
    AgreementInterval(value=1.0, low=1.0, high=1.0, items=4, clusters=2)
    """
    if clusters is not None and len(clusters) != len(ratings):
        raise DataError(f"one cluster an item: found {len(clusters)} for {len(ratings)} items")
    table_NKK, value = _table_and_measure(labels_of(ratings), measure, level)
    has_pair_N = table_NKK.sum(axis=(1, 2)) > 0
    names = list(range(len(ratings))) if clusters is None else list(clusters)
    group_N = places_of([name for name, has_pair in zip(names, has_pair_N, strict=True) if has_pair])
    groups = int(group_N.max()) + 1
    if groups < _FEWEST_CLUSTERS:
        raise DataError(f"an interval needs two clusters with items that two people labelled: found {groups}")
    size = table_NKK.shape[1]
    total_GKK = np.zeros((groups, size, size))
    np.add.at(total_GKK, group_N, table_NKK[has_pair_N])
    drawn = [
        value(total_GKK[rows].sum(axis=0)) for batch in bootstrap_rows(groups, seed=seed, draws=draws) for rows in batch
    ]
    low, high = percentile_interval(np.array(drawn))
    return AgreementInterval(
        value=value(total_GKK.sum(axis=0)), low=low, high=high, items=int(has_pair_N.sum()), clusters=groups
    )


def alpha_of_many(
    labels: Labels, clusters: Sequence[Hashable], *, level: Level, seed: int = 0, draws: int = BOOTSTRAP_DRAWS
) -> AgreementInterval:
    """Krippendorff's α of many labels that are laid out already, with the interval of `agreement_interval`.

    Clusters with the same labels have the same table: how often each table is drawn is one multinomial draw, so that
    the interval takes no longer for a million labels than for a thousand.

    >>> labels = labels_of([[0, 0], [0, 1], [1, 1], [1, 1]])
    >>> interval = alpha_of_many(labels, ["p", "p", "q", "r"], level="nominal")
    >>> round(interval.value, 4), interval.items, interval.clusters
    (0.5333, 4, 3)
    """
    table_NKK, values = coincidences(labels)
    alpha = _alpha(level, values)
    has_pair_N = table_NKK.sum(axis=(1, 2)) > 0
    group_N = places_of([name for name, has_pair in zip(clusters, has_pair_N, strict=True) if has_pair])
    groups, size = int(group_N.max()) + 1, table_NKK.shape[1]
    total_GKK = np.zeros((groups, size, size))
    np.add.at(total_GKK, group_N, table_NKK[has_pair_N])
    total_KK = total_GKK.sum(axis=0)
    low = high = alpha(total_KK)
    if groups >= _FEWEST_CLUSTERS:
        different_UE, count_U = np.unique(total_GKK.reshape(groups, -1), axis=0, return_counts=True)
        drawn_DU = np.random.default_rng(seed).multinomial(groups, count_U / groups, size=draws)
        low, high = percentile_interval(np.array([alpha(row.reshape(size, size)) for row in drawn_DU @ different_UE]))
    return AgreementInterval(value=alpha(total_KK), low=low, high=high, items=int(has_pair_N.sum()), clusters=groups)


def coincidences(labels: Labels) -> tuple[Floats, tuple[float, ...]]:
    """For each item, how often two of its labels are c and k: Σ over ordered pairs of people / (labels − 1).

    Each label counts once in all, whatever the number of labels of its item; an item with one label counts nothing.
    """
    size = len(labels.values)
    count_NK = np.zeros((labels.items, size))
    np.add.at(count_NK, (labels.item_M, labels.class_M), 1.0)
    num_N = count_NK.sum(axis=1)
    if not (num_N > 1).any():
        raise DataError(
            f"agreement needs an item with labels of two people: found {len(labels.item_M):,} labels on "
            f"{labels.items:,} items, {labels.people:,} people"
        )
    pairs_NKK = count_NK[:, :, None] * count_NK[:, None, :] - count_NK[:, :, None] * np.eye(size)
    return pairs_NKK / np.maximum(num_N - 1, 1)[:, None, None], labels.values


def majority(ratings: Ratings) -> list[float | None]:
    """The most frequent label of each item; None where two are equally frequent, or none was given.

    >>> majority([[1, 1, 2], [1, 2, None], [None, None, None]])
    [1, None, None]
    """
    return [_most_frequent(Counter(label for label in row if label is not None).most_common(2)) for row in ratings]


def unanimous(ratings: Ratings) -> int:
    """How many items have two labels or more and all of them equal.

    >>> unanimous([[1, 1, 1], [1, 1, None], [1, 2, 1], [1, None, None]])
    2
    """
    rows = [[label for label in row if label is not None] for row in ratings]
    return sum(len(row) > 1 and len(set(row)) == 1 for row in rows)


def _most_frequent(counts: Sequence[tuple[float, int]]) -> float | None:
    is_tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    return None if not counts or is_tied else counts[0][0]


def _table_and_measure(labels: Labels, measure: Measure, level: Level) -> tuple[Floats, Callable[[Floats], float]]:
    if measure not in _MEASURES:
        raise DataError(f"measure is one of {', '.join(_MEASURES)}: found {measure!r}")
    if measure == "cohen":
        return _contingency(labels), _cohen
    table_NKK, values = coincidences(labels)
    match measure:
        case "raw":
            return table_NKK, _raw
        case "fleiss":
            _refuse_unequal(labels)
            return table_NKK, _fleiss
        case "alpha":
            return table_NKK, _alpha(level, values)


def _contingency(labels: Labels) -> Floats:
    """For each item a single 1 at the labels of the first and the second person, if it has both."""
    if labels.people != 2:
        raise DataError(f"cohen is for two people: found {labels.people}")
    size = len(labels.values)
    class_NJ = np.full((labels.items, 2), -1)
    class_NJ[labels.item_M, labels.person_M] = labels.class_M
    rows = np.flatnonzero((class_NJ >= 0).all(axis=1))
    if not len(rows):
        raise DataError(f"cohen: none of the {labels.items} items has a label of both people")
    table_NKK = np.zeros((labels.items, size, size))
    table_NKK[rows, class_NJ[rows, 0], class_NJ[rows, 1]] = 1.0
    return table_NKK


def _cohen(total_KK: Floats) -> float:
    share_KK = total_KK / total_KK.sum()
    expected = float(share_KK.sum(axis=0) @ share_KK.sum(axis=1))
    return _beyond_chance(float(np.trace(share_KK)), expected)


def _raw(total_KK: Floats) -> float:
    return float(np.trace(total_KK) / total_KK.sum())


def _fleiss(total_KK: Floats) -> float:
    share_K = total_KK.sum(axis=0) / total_KK.sum()
    return _beyond_chance(_raw(total_KK), float(share_K @ share_K))


def _beyond_chance(observed: float, expected: float) -> float:
    return 1.0 if expected >= 1 else (observed - expected) / (1 - expected)


def _alpha(level: Level, values: Sequence[float]) -> Callable[[Floats], float]:
    if level not in _LEVELS:
        raise DataError(f"level is one of {', '.join(_LEVELS)}: found {level!r}")
    value_K = np.array(values, dtype=np.float64)

    def alpha(total_KK: Floats) -> float:
        count_K = total_KK.sum(axis=0)
        distance_KK = _distances(level, value_K, count_K)
        expected_KK = (np.outer(count_K, count_K) - np.diag(count_K)) / (count_K.sum() - 1)
        expected = float((expected_KK * distance_KK).sum())
        return 1.0 if expected == 0 else 1 - float((total_KK * distance_KK).sum()) / expected

    return alpha


def _distances(level: Level, value_K: Floats, count_K: Floats) -> Floats:
    """How far two labels are apart, squared; between ordinal ones lie all labels up to the middle of both classes."""
    match level:
        case "nominal":
            return 1 - np.eye(len(value_K))
        case "ordinal":
            middle_K = np.cumsum(count_K) - count_K / 2
            return np.square(middle_K[:, None] - middle_K[None, :])
        case "interval":
            return np.square(value_K[:, None] - value_K[None, :])


def _refuse_unequal(labels: Labels) -> None:
    counts = np.bincount(labels.item_M, minlength=labels.items)
    odd = np.flatnonzero(counts != counts[0])
    if len(odd):
        raise DataError(
            f"Fleiss' κ needs equally many labels an item: item 0 has {counts[0]}, item {odd[0]} has {counts[odd[0]]}; "
            "krippendorff_alpha allows missing labels"
        )
