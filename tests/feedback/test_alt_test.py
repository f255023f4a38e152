"""The alt-test: by hand, beside scipy and statsmodels, and with judges whose worth is known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats  # pyright: ignore[reportMissingTypeStubs]
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests  # pyright: ignore[reportMissingTypeStubs]

from kedge.core.errors import DataError
from kedge.feedback.alt_test import Choice, alt_test, benjamini_yekutieli, student_below, wilcoxon_below

CHOICES: tuple[Choice, ...] = ("first", "second", "tie")


def simulated(
    seed: int, *, judge: float, people: tuple[float, ...] = (0.85, 0.85, 0.85), items: int = 300
) -> tuple[list[dict[str, Choice]], list[Choice | None]]:
    """Verdicts of people and of a judge that name the truth with these probabilities, else one of the others."""
    rng = np.random.default_rng(seed)

    def draw(truth: int, accuracy: float) -> Choice:
        return CHOICES[truth if rng.random() < accuracy else (truth + rng.integers(1, 3)) % 3]

    truths = rng.integers(3, size=items)
    verdicts = [{f"p{place}": draw(truth, accuracy) for place, accuracy in enumerate(people)} for truth in truths]
    return verdicts, [draw(truth, judge) for truth in truths]


def test_a_small_case_by_hand() -> None:
    """Three people, four items; the judge's reply to the last cannot be read."""
    people: list[dict[str, Choice]] = [
        {"x": "first", "y": "first", "z": "first"},
        {"x": "first", "y": "second", "z": "second"},
        {"x": "tie", "y": "tie", "z": "first"},
        {"x": "second", "y": "second"},
    ]
    found = alt_test(people, ["first", "second", "first", None])
    assert found is not None
    x, y, z = found.people
    # x left out. Others agree with the judge 2, 2, 1, 0 times and with x 2, 0, 1, 1 times.
    assert (x.person, x.items, x.judge, x.human) == ("x", 4, 0.75, 0.75)
    # y left out: judge 2, 1, 1, 0 (of x, z), y 2, 1, 1, 1.
    assert (y.items, y.judge, y.human) == (4, 0.75, 1.0)
    # z left out: judge 2, 1, 0, and z 2, 1, 0; the last item is not z's.
    assert (z.items, z.judge, z.human) == (3, 1.0, 1.0)
    # Differences less ε: x 0, −1, 0, 1 − 0.2 → ranks 1.5, 4, 1.5, 3: a sum of 3 above, of 16 signs.
    assert x.p_value == wilcoxon_below([0, -1, 0, 1], 0.2)
    # z: 3 differences below ε of the same size: one way of 8.
    assert (z.p_value, z.test) == (0.125, "wilcoxon")
    assert found.omega == 0
    assert found.advantage == pytest.approx((0.75 + 0.75 + 1) / 3)


def test_ranks_by_hand() -> None:
    """−0.2, −1.2, −0.2, 0.8 have ranks 1.5, 4, 1.5, 3: of 16 signs these have a sum above of at most 3: none; 1.5
    twice; 3 and 1.5 + 1.5."""
    assert wilcoxon_below([0, -1, 0, 1], 0.2) == 5 / 16


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=10), st.sampled_from([0.2, 0.1]))
def test_wilcoxon_is_the_share_of_all_signs(values: list[float], bound: float) -> None:
    gaps = np.round(np.array(values) - bound, 12)
    rank = scipy.stats.rankdata(np.abs(gaps))
    observed = rank[gaps > 0].sum()
    sums = [float(rank @ np.array(signs)) for signs in itertools.product((0, 1), repeat=len(values))]
    assert wilcoxon_below(values, bound) == pytest.approx(np.mean([total <= observed + 1e-9 for total in sums]))


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=30, max_size=80))
def test_student_is_scipys(values: list[float]) -> None:
    if len(set(values)) == 1:
        assert student_below(values, 0.2) == float(values[0] > 0.2)
        return
    theirs: Any = scipy.stats.ttest_1samp(values, 0.2, alternative="less")
    assert student_below(values, 0.2) == pytest.approx(float(theirs.pvalue), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_benjamini_and_yekutieli_are_statsmodels(p_values: list[float]) -> None:
    theirs: Any = multipletests(p_values, alpha=0.05, method="fdr_by")[0]
    assert benjamini_yekutieli(p_values, 0.05) == theirs.tolist()


def test_a_copy_of_a_good_annotator_replaces_and_a_coin_does_not() -> None:
    copies, coins = [], []
    for seed in range(20):
        people, judge = simulated(seed, judge=0.85)
        copies.append(alt_test(people, judge))
        coins.append(alt_test(people, simulated(1000 + seed, judge=1 / 3)[1]))
    assert math.fsum(found.omega for found in copies if found) / 20 >= 0.95
    assert all(found is not None and found.omega == 0 for found in coins)


def test_the_test_holds_its_level_on_the_boundary() -> None:
    """A judge that loses exactly ε more often than it wins is let through about as often as the level says."""
    rng = np.random.default_rng(5)
    p_values = [student_below(rng.choice([0.0, 1.0], p=[0.8, 0.2], size=200).tolist(), 0.2) for _ in range(400)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)


def test_unreadable_replies_are_wrong() -> None:
    people, judge = simulated(3, judge=0.95)
    found = alt_test(people, judge)
    blinded = alt_test(people, [None] * 150 + judge[150:])
    assert found is not None
    assert blinded is not None
    assert found.omega == 1
    assert blinded.omega == 0


def test_nobody_beside_anybody_is_not_measured_and_odd_lengths_are_refused() -> None:
    assert alt_test([{"x": "first"}], ["first"]) is None
    with pytest.raises(DataError, match="one verdict of the judge an item: found 2 for 1"):
        alt_test([{"x": "first"}], ["first", "first"])
