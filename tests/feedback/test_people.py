"""One person's labels: gold, repeats, sides, runs, speed, drift, steps; against enumeration, scipy and statsmodels."""

from __future__ import annotations

import itertools
import math
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, kendalltau  # pyright: ignore[reportMissingTypeStubs]
from statsmodels.stats.proportion import (  # pyright: ignore[reportMissingTypeStubs]
    confint_proportions_2indep,
    proportion_confint,
)

from kedge.core.errors import DataError
from kedge.feedback import (
    drift,
    gold_check,
    kendall_tau_b,
    longest_side_run,
    margin_of,
    position_bias,
    run_probability,
    self_agreement,
    strict_pair_agreement,
    tie_share,
    words_a_minute,
)
from kedge.feedback.people import RUN_PROBABILITY, WORDS_A_MINUTE


@given(st.integers(0, 400).flatmap(lambda seen: st.tuples(st.integers(0, seen), st.just(seen))))
def test_the_gold_posterior_is_a_beta(counts: tuple[int, int]) -> None:
    right, seen = counts
    check = gold_check(right, seen)
    assert check.below == pytest.approx(beta(1 + right, 1 + seen - right).cdf(0.75), abs=1e-9)
    assert check.accuracy == pytest.approx(beta(1 + right, 1 + seen - right).mean())
    assert check.pause == (seen >= 8 and check.below > 0.95)


def test_the_gold_rule_pauses_at_four_of_eight_and_not_before_eight() -> None:
    assert [gold_check(right, 8).pause for right in range(9)] == [True] * 5 + [False] * 4
    assert not any(gold_check(0, seen).pause for seen in range(8))


def test_shares_have_wilson_intervals() -> None:
    bias, ties = position_bias(30, 10), tie_share(10, 40)
    low, high = proportion_confint(30, 40, method="wilson")
    assert (bias.value, bias.low, bias.high, bias.count) == pytest.approx((0.25, low - 0.5, high - 0.5, 40))
    assert (ties.low, ties.high) == pytest.approx(proportion_confint(10, 40, method="wilson"))
    assert position_bias(20, 20).low < 0 < position_bias(20, 20).high
    assert position_bias(5, 0).value == 0.5


def test_self_agreement_counts_equal_labels() -> None:
    share = self_agreement([1, 2, 0, 1], [1, 1, 0, 2])
    assert (share.value, share.count) == (0.5, 4)


@pytest.mark.parametrize("labels", range(1, 11))
def test_the_probability_of_a_run_is_that_of_all_sequences(labels: int) -> None:
    longest = [max(len(list(run)) for _, run in groupby(sides)) for sides in itertools.product("lr", repeat=labels)]
    for length in range(1, labels + 2):
        expected = sum(run >= length for run in longest) / len(longest)
        assert run_probability(length, labels) == pytest.approx(expected, abs=1e-12)


def test_a_run_of_one_side_is_found() -> None:
    run = longest_side_run(["r", "l"] * 10 + ["l"] * 16 + ["r", "l"] * 10)
    assert (run.side, run.length) == ("l", 17)
    assert run.probability == run_probability(17, 56) < RUN_PROBABILITY
    assert longest_side_run(["l", "r"] * 28).probability == 1.0


def test_reading_speed() -> None:
    assert words_a_minute(500, 29) > WORDS_A_MINUTE > words_a_minute(500, 31)
    assert words_a_minute(10, 0) == math.inf


@pytest.mark.parametrize(("early", "late"), [((80, 100), (30, 50)), ((45, 50), (25, 50)), ((9, 10), (9, 10))])
def test_drift_has_newcombes_interval(early: tuple[int, int], late: tuple[int, int]) -> None:
    outcomes = [number < early[0] for number in range(early[1])] + [number < late[0] for number in range(late[1])]
    change = drift(outcomes, late=late[1])
    low, high = confint_proportions_2indep(*late, *early, method="newcomb", compare="diff")
    assert (change.low, change.high) == pytest.approx((low, high), abs=1e-9)
    assert change.difference == pytest.approx(late[0] / late[1] - early[0] / early[1])
    assert change.is_worse == (high < 0)


ranks = st.integers(2, 7).flatmap(lambda n: st.tuples(*[st.lists(st.integers(1, 4), min_size=n, max_size=n)] * 2))


@given(ranks)
def test_tau_b_is_that_of_scipy(both: tuple[list[int], list[int]]) -> None:
    a, b = both
    value, theirs = kendall_tau_b(a, b), kendalltau(a, b).statistic
    assert (value is None) == math.isnan(theirs)
    assert value is None or value == pytest.approx(theirs)


@given(ranks)
def test_strict_pairs_by_counting(both: tuple[list[int], list[int]]) -> None:
    a, b = both
    pairs = [(i, j) for i, j in itertools.combinations(range(len(a)), 2) if a[i] != a[j] and b[i] != b[j]]
    expected = sum((a[i] < a[j]) == (b[i] < b[j]) for i, j in pairs) / len(pairs) if pairs else None
    assert strict_pair_agreement(a, b) == expected


def test_steps_to_margins() -> None:
    assert [margin_of(step) for step in range(-3, 4)] == [1, 2 / 3, 1 / 3, None, 1 / 3, 2 / 3, 1]
    assert [margin_of(step, margins="large") for step in range(-3, 4)] == [3, 2, 1, None, 1, 2, 3]


CASES: dict[str, tuple[Any, str]] = {
    "more right than seen": (lambda: gold_check(9, 8), "found 9 of 8"),
    "a threshold of 1": (lambda: gold_check(8, 8, threshold=1.0), r"between 0 and 1: found 1\.0"),
    "no repeats": (lambda: self_agreement([], []), "found 0 labels and 0"),
    "other repeats": (lambda: self_agreement([1], [1, 2]), "found 1 labels and 2"),
    "no sides": (lambda: position_bias(0, 0), "found 0 of 0"),
    "more ties than labels": (lambda: tie_share(3, 2), "found 3 of 2"),
    "no run": (lambda: longest_side_run([]), "no label chose a side"),
    "nothing before": (lambda: drift([True] * 5, late=5), "last 5 labels with those before: found 5"),
    "a step of 4": (lambda: margin_of(4), "from -3 to 3: found 4"),
    "odd margins": (lambda: margin_of(1, margins="huge"), "small, large: found 'huge'"),  # pyright: ignore
    "other answers": (lambda: kendall_tau_b([1, 2], [1, 2, 3]), "found 2 ranks and 3"),
    "one answer": (lambda: strict_pair_agreement([1], [1]), "at least two: found 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(DataError, match=message):
        call()
