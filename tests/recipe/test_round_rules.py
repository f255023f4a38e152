"""The rules of rounds, without a run: ages of labels, drift, stopping, the best round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kedge.recipe.round_rules import (
    RoundResult,
    best_round,
    drift_checks,
    gains,
    has_converged,
    reward_age,
    weight_of_age,
)
from kedge.recipe.round_settings import DriftLimits, GainSettings
from kedge.stages.drift.reward_models import changes_of_order


def result(number: int, gold: float | None, *, before: float | None = None, **more: Any) -> RoundResult:
    fields: dict[str, Any] = {"win_rate": None, "has_passed": True, **more}
    return RoundResult(number=number, gold=gold, previous_gold=before, **fields)


def failed(figures: dict[str, Any], **limits: Any) -> set[str]:
    return {check.name for check in drift_checks(figures, DriftLimits(**limits)) if check.has_failed}


def test_a_label_counts_half_after_so_many_rounds_and_a_quarter_after_twice_as_many() -> None:
    assert [weight_of_age(age, 3) for age in (0, 3, 6)] == [1.0, 0.5, 0.25]
    assert weight_of_age(1, 3) > weight_of_age(2, 3) > weight_of_age(3, 3)


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"policy": {"kl_previous": 15.1}}, "kl_previous"),
        ({"policy": {"kl_first": 30.1}}, "kl_first"),
        ({"policy": {"length": 31.0, "previous_length": 20.0}}, "length_ratio"),
        ({"policy": {"length": 10.0, "previous_length": 20.0}}, "length_ratio"),
        ({"policy": {"refusals": 0.5, "previous_refusals": 0.1, "answers": 200}}, "refusal_rise"),
        ({"policy": {"distinct": 0.1, "previous_distinct": 0.3}}, "distinct_ratio"),
        ({"policy": {"win_rate": {"value": 0.3, "low": 0.22, "high": 0.38}}}, "win_rate"),
        ({"reward": {"anchor": {"spearman": 0.4, "flips": 0.1, "pairs": 100}}}, "spearman"),
        ({"reward": {"anchor": {"spearman": 0.9, "flips": 0.5, "pairs": 100}}}, "flips"),
        ({"reward": {"heldout": {"round-1": {"accuracy": 0.6, "high": 0.65, "then": 0.8}}}}, "forgetting round-1"),
        ({"reward": {"ece": 0.2}}, "ece"),
        ({"reward": {"shift": -2.5}}, "shift"),
        ({"labels": {"alpha": 0.2, "first_alpha": 0.5}}, "alpha_drop"),
        ({"labels": {"kappa": 0.2, "first_kappa": 0.5}}, "kappa_drop"),
        ({"labels": {"kappa": 0.2, "kappa_high": 0.3, "first_kappa": 0.5}}, "kappa_drop"),
    ],
)
def test_each_check_fails_beyond_its_limit_alone_and_never_without_one(figures: dict[str, Any], name: str) -> None:
    assert failed(figures) == {name}
    assert failed(figures, **{name.partition(" ")[0]: None}) == set()


@pytest.mark.parametrize(
    "figures",
    [
        {"policy": {"refusals": 0.5, "previous_refusals": 0.1, "answers": 4}},
        {"policy": {"win_rate": {"value": 0.3, "low": 0.1, "high": 0.6}}},
        {"reward": {"anchor": {"spearman": 0.9, "flips": 0.5, "pairs": 4}}},
        {"reward": {"heldout": {"round-1": {"accuracy": 0.6, "high": 0.9, "then": 0.8}}}},
        {"reward": {"heldout": {"round-2": {"accuracy": 0.1, "high": 0.2, "then": None}}}},
        {"labels": {"kappa": 0.2, "kappa_high": 0.4, "first_kappa": 0.5}},
        {},
    ],
)
def test_a_few_items_and_what_was_not_measured_are_no_drift(figures: dict[str, Any]) -> None:
    assert failed(figures) == set()


def test_flips_and_rank_correlation_of_two_reward_models() -> None:
    old = np.array([[4.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    assert changes_of_order(old, 2 * old + 7) == {"pairs": 3, "spearman": 1.0, "flips": 0.0}
    assert changes_of_order(old, -old) == {"pairs": 3, "spearman": -1.0, "flips": 1.0}
    assert changes_of_order(old, np.ones_like(old))["spearman"] is None


def test_gains_are_over_the_round_before_or_over_the_first_policy() -> None:
    results = [result(1, 3.0, before=1.0), result(2, 2.5, before=3.0)]
    assert gains(results, "previous") == [2.0, -0.5]
    assert gains(results, "first") == [2.0, 1.5]
    assert gains([result(1, None, win_rate=0.7)], "previous") == [pytest.approx(0.2)]


def test_two_rounds_in_a_row_without_a_gain_end_the_rounds_and_one_does_not() -> None:
    twice, once = GainSettings(), GainSettings(twice=False)
    fallen = [result(1, 3.0, before=1.0), result(2, 2.9, before=3.0)]
    assert has_converged(fallen, twice) is None
    assert has_converged(fallen, once) == "gained -0.100 over the previous policy, less than 0"
    assert has_converged([*fallen, result(3, 2.8, before=2.9)], twice) is not None
    assert has_converged([*fallen, result(3, 3.1, before=2.9)], twice) is None
    assert has_converged([result(1, None)], once) is None  # nothing is known


def test_the_best_round_is_the_one_with_most_gold_that_passed() -> None:
    results = [result(1, 3.0, before=1.0), result(2, 4.0, before=3.0, has_passed=False), result(3, 2.0, before=4.0)]
    best = best_round(results)
    assert (best.round, best.evidence) == (1, {"0": 1.0, "1": 3.0, "3": 2.0})
    assert "round 1 is the best by the mean of gold" in best.words
    assert "round 2 did not pass" in best.words


def test_the_first_policy_is_the_best_where_no_round_is_better_and_the_earlier_of_equals() -> None:
    assert best_round([result(1, 0.5, before=1.0), result(2, 1.0, before=0.5)]).round == 0
    assert best_round([result(1, 2.0, before=1.0), result(2, 2.0, before=2.0)]).round == 1


def test_without_gold_the_judge_decides_along_the_chain_and_without_both_the_last_that_passed() -> None:
    rates = [result(1, None, win_rate=0.7), result(2, None, win_rate=0.45), result(3, None, win_rate=0.52)]
    assert best_round(rates).round == 1
    assert best_round([*rates, result(4, None, win_rate=0.8)]).round == 4
    assert best_round([result(1, None), result(2, None, has_passed=False)]).round == 1


def test_the_age_of_a_reward_model_is_the_way_that_the_policy_went_since() -> None:
    figures = {"policy": {"kl_previous": 4.0, "kl_first": 9.0}}
    assert reward_age(figures, made_in=3, now=3) == 0.0
    assert reward_age(figures, made_in=2, now=3) == 4.0
    assert reward_age(figures, made_in=1, now=3) == 9.0
    assert reward_age({}, made_in=1, now=3) is None
