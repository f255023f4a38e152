"""Labels of several people on the same items, checked and laid out for the statistics.

`ratings[item][person]` is a number, or None where that person gave no label to that item. Shape letters: N items,
J people, M labels that were given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import Ints

Ratings = Sequence[Sequence[float | None]]
"""One row an item, one place a person; None is a label that was not given."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """The labels that were given, one after the other in the order of items and people."""

    item_M: Ints
    person_M: Ints
    class_M: Ints
    """The place of the label in `values`."""
    values: tuple[float, ...]
    """The different labels, ascending."""
    items: int
    people: int


def labels_of(ratings: Ratings) -> Labels:
    """
    >>> labels = labels_of([[5, None], [2, 5]])
    >>> labels.item_M.tolist(), labels.person_M.tolist(), labels.class_M.tolist(), labels.values
    ([0, 1, 1], [0, 0, 1], [1, 0, 1], (2, 5))
    """
    people = _people(ratings)
    given = [
        (item, person, label)
        for item, row in enumerate(ratings)
        for person, label in enumerate(row)
        if label is not None
    ]
    if not given:
        raise DataError(f"ratings hold no label: all {len(ratings):,} × {people:,} places are None")
    for item, person, label in given:
        _refuse_odd_label(label, item, person)
    values = sorted({label for _, _, label in given})
    place = {value: index for index, value in enumerate(values)}
    return Labels(
        item_M=np.array([item for item, _, _ in given], dtype=np.int64),
        person_M=np.array([person for _, person, _ in given], dtype=np.int64),
        class_M=np.array([place[label] for _, _, label in given], dtype=np.int64),
        values=tuple(values),
        items=len(ratings),
        people=people,
    )


def _people(ratings: Ratings) -> int:
    """How many people there are: every row has a place for each."""
    if not len(ratings) or not len(ratings[0]):
        raise DataError("ratings are empty: expected one row an item with one place a person")
    people = len(ratings[0])
    for item, row in enumerate(ratings):
        if len(row) != people:
            raise DataError(
                f"ratings[{item}] has {len(row)} places and ratings[0] has {people}: a row has one for each person, "
                "None where a label is missing"
            )
    return people


def _refuse_odd_label(label: object, item: int, person: int) -> None:
    is_number = isinstance(label, int | float | np.integer | np.floating) and not isinstance(label, bool)
    if not is_number or not math.isfinite(cast(float, label)):
        raise DataError(
            f"ratings[{item}][{person}] is {label!r}: a label is a finite number, or None where it is missing"
        )
