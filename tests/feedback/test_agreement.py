"""Agreement: closed forms, limits, the libraries of the field, intervals by cluster, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any, get_args

import krippendorff  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.inter_rater import aggregate_raters, cohens_kappa  # pyright: ignore[reportMissingTypeStubs]
from statsmodels.stats.inter_rater import fleiss_kappa as their_fleiss  # pyright: ignore[reportMissingTypeStubs]

from kedge.core.errors import DataError
from kedge.feedback import (
    agreement_interval,
    cohen_kappa,
    dawid_skene,
    fleiss_kappa,
    krippendorff_alpha,
    majority,
    raw_agreement,
    unanimous,
)
from kedge.feedback.agreement import Level, Measure
from kedge.feedback.ratings import Ratings

DATA = os.environ.get("KEDGE_EVAL_DATA", "")
LEVELS: tuple[Level, ...] = get_args(Level)


def random_ratings(seed: int, *, items: int = 40, people: int = 4, classes: int = 4, missing: float = 0.3) -> Any:
    """Labels that agree about half of the time; the first two items have labels of all."""
    rng = np.random.default_rng(seed)
    truth_N = rng.integers(classes, size=items)
    label_NJ = np.where(
        rng.random((items, people)) < 0.5, truth_N[:, None], rng.integers(classes, size=(items, people))
    )
    gone_NJ = rng.random((items, people)) < missing
    gone_NJ[:2] = False
    return [
        [None if gone else int(label) for label, gone in zip(labels, gones, strict=True)]
        for labels, gones in zip(label_NJ, gone_NJ, strict=True)
    ]


def as_krippendorff(ratings: Ratings) -> Any:
    """People in rows, nan for a missing label."""
    return np.array([[math.nan if label is None else float(label) for label in row] for row in ratings]).T


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.7])
def test_alpha_equals_that_of_krippendorff(level: Level, missing: float) -> None:
    for seed in range(5):
        ratings = random_ratings(seed, missing=missing)
        theirs = krippendorff.alpha(reliability_data=as_krippendorff(ratings), level_of_measurement=level)
        assert krippendorff_alpha(ratings, level=level) == pytest.approx(theirs, abs=1e-12)


def test_ordinal_alpha_reads_steps_below_zero() -> None:
    ratings = [[None if label is None else label - 3 for label in row] for row in random_ratings(7, classes=7)]
    theirs = krippendorff.alpha(reliability_data=as_krippendorff(ratings), level_of_measurement="ordinal")
    assert krippendorff_alpha(ratings, level="ordinal") == pytest.approx(theirs, abs=1e-12)


def test_kappas_equal_those_of_statsmodels() -> None:
    for seed in range(5):
        ratings = random_ratings(seed, missing=0)
        assert fleiss_kappa(ratings) == pytest.approx(their_fleiss(aggregate_raters(np.array(ratings))[0]), abs=1e-12)
        first, second = [row[0] for row in ratings], [row[1] for row in ratings]
        table = np.zeros((4, 4))
        np.add.at(table, (first, second), 1)
        assert cohen_kappa(first, second) == pytest.approx(cohens_kappa(table).kappa, abs=1e-12)


def test_fleiss_allows_other_people_for_each_item() -> None:
    """Equal counts are needed, not the same people."""
    assert fleiss_kappa([[0, 0, None], [None, 1, 1], [0, None, 1]]) == fleiss_kappa([[0, 0], [1, 1], [0, 1]])


@pytest.mark.parametrize("level", LEVELS)
def test_one_class_is_the_limit_of_perfect_agreement(level: Level) -> None:
    same = [[2, 2, 2], [2, 2, 2]]
    assert krippendorff_alpha(same, level=level) == fleiss_kappa(same) == cohen_kappa([2, 2], [2, 2]) == 1.0
    assert agreement_interval(same).low == 1.0


def test_alpha_of_two_people_by_hand() -> None:
    """Krippendorff 2011, nominal, two people, no missing labels: o_01 = 2 of n = 10 labels, n_0 = 6, n_1 = 4."""
    ratings = [[0, 0], [0, 0], [1, 1], [0, 1], [0, 1]]
    assert krippendorff_alpha(ratings) == pytest.approx(1 - (10 - 1) * 4 / (2 * 6 * 4))


@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_names_and_order_of_classes_and_people_do_not_matter(seed: int, order: list[int]) -> None:
    ratings = random_ratings(seed, missing=0)
    renamed = [[order[label] for label in row] for row in ratings]
    turned = [[row[person] for person in order] for row in ratings]
    assert krippendorff_alpha(renamed) == pytest.approx(krippendorff_alpha(ratings))
    assert fleiss_kappa(renamed) == pytest.approx(fleiss_kappa(ratings))
    assert krippendorff_alpha(turned, level="ordinal") == pytest.approx(krippendorff_alpha(ratings, level="ordinal"))


def test_agreement_by_chance_is_near_zero() -> None:
    rng = np.random.default_rng(0)
    ratings = rng.integers(3, size=(20_000, 2)).tolist()
    assert max(abs(krippendorff_alpha(ratings)), abs(fleiss_kappa(ratings))) < 0.02
    assert raw_agreement(ratings) == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("measure", get_args(Measure))
def test_the_value_of_an_interval_is_the_measure(measure: Measure) -> None:
    ratings = random_ratings(3, people=2, missing=0)
    expected = {
        "raw": raw_agreement(ratings),
        "cohen": cohen_kappa([row[0] for row in ratings], [row[1] for row in ratings]),
        "fleiss": fleiss_kappa(ratings),
        "alpha": krippendorff_alpha(ratings),
    }
    interval = agreement_interval(ratings, measure=measure, clusters=[number // 3 for number in range(len(ratings))])
    assert (interval.items, interval.clusters) == (40, 14)
    assert interval.value == pytest.approx(expected[measure], abs=1e-12)
    assert interval.low < interval.value < interval.high


def test_the_bootstrap_draws_whole_clusters() -> None:
    """An interval over copies of the same items is as wide as over the items once."""
    ratings = random_ratings(1, people=3)
    copies = [row for row in ratings for _ in range(5)]
    names = [number for number in range(len(ratings)) for _ in range(5)]
    once, clustered = agreement_interval(ratings), agreement_interval(copies, clusters=names)
    naive = agreement_interval(copies)
    assert clustered.high - clustered.low == pytest.approx(once.high - once.low, rel=0.15)
    assert naive.high - naive.low < 0.6 * (once.high - once.low)
    assert agreement_interval(copies, clusters=names) == clustered


def test_the_interval_covers_the_truth_about_19_times_in_20() -> None:
    """Two people, each right with 0.8, 2 classes: they agree with 0.68."""
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        interval = agreement_interval((rng.random((150, 2)) < 0.8).astype(int).tolist(), measure="raw", draws=300)
        hits += interval.low <= 0.68 <= interval.high
    assert 88 <= hits <= 100


CASES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda: krippendorff_alpha([]), "ratings are empty"),
    "no people": (lambda: krippendorff_alpha([[]]), "ratings are empty"),
    "all missing": (lambda: krippendorff_alpha([[None, None], [None, None]]), "hold no label: all 2 × 2"),
    "one person": (lambda: krippendorff_alpha([[0], [1]]), "needs an item with labels of two people: found 2 labels"),
    "never two": (lambda: raw_agreement([[0, None], [None, 1]]), "needs an item with labels of two people"),
    "rows of unequal length": (
        lambda: fleiss_kappa([[0, 1], [0]]),
        r"ratings\[1\] has 1 places and ratings\[0\] has 2",
    ),
    "unequal counts": (lambda: fleiss_kappa([[0, 1], [0, None]]), "item 0 has 2, item 1 has 1; krippendorff_alpha"),
    "a word": (lambda: krippendorff_alpha([["a", "b"]]), r"ratings\[0\]\[0\] is 'a'"),  # pyright: ignore
    "nan": (lambda: krippendorff_alpha([[0, math.nan]]), r"ratings\[0\]\[1\] is nan"),
    "unknown level": (lambda: krippendorff_alpha([[0, 1]], level="ratio"), "nominal, ordinal, interval: found 'ratio'"),  # pyright: ignore
    "unknown measure": (lambda: agreement_interval([[0, 1]], measure="kappa"), "raw, cohen, fleiss, alpha: found"),  # pyright: ignore
    "other items": (lambda: cohen_kappa([0, 1], [0]), "found 2 labels and 1"),
    "no common item": (lambda: cohen_kappa([0, None], [None, 1]), "none of the 2 items has a label of both"),
    "cohen of three": (lambda: agreement_interval([[0, 1, 1]] * 2, measure="cohen"), "for two people: found 3"),
    "clusters missing": (lambda: agreement_interval([[0, 1]] * 2, clusters=["p"]), "found 1 for 2 items"),
    "one cluster": (lambda: agreement_interval([[0, 1]] * 2, clusters=["p", "p"]), "needs two clusters"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_agreement_is_refused(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.skipif(not DATA, reason="KEDGE_EVAL_DATA names no folder with public evaluation data")
def test_agreement_of_three_people_on_pandalm() -> None:
    with gzip.open(Path(DATA) / "agreement" / "pandalm.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    ratings = [row["labels"] for row in rows]
    kappas, raws = [], []
    for a, b in ((0, 1), (0, 2), (1, 2)):
        kappas.append(round(cohen_kappa([row[a] for row in ratings], [row[b] for row in ratings]), 4))
        raws.append(round(raw_agreement([[row[a], row[b]] for row in ratings]), 4))
    assert kappas == [0.8520, 0.8789, 0.8617]
    assert raws == [0.9129, 0.9289, 0.9179]
    assert round(fleiss_kappa(ratings), 4) == round(krippendorff_alpha(ratings), 4) == 0.8642
    in_order = [[(1, 0, 2)[label] for label in row] for row in ratings]  # first, tie, second
    assert round(krippendorff_alpha(in_order, level="ordinal"), 4) == 0.8775
    labels = majority(ratings)
    assert (unanimous(ratings), [labels.count(label) for label in (0, 1, 2)]) == (879, [105, 422, 472])
    assert dawid_skene(ratings, classes=3).labels == labels
    clustered = agreement_interval(ratings, clusters=[row["prompt"] for row in rows])
    naive = agreement_interval(ratings)
    assert clustered.high - clustered.low > naive.high - naive.low
