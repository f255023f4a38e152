"""Win rates by judges, worked out by hand; and figures that others have published from stored verdicts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.core.stats import cohen_kappa
from kedge.evaluate.agreement import agreement, detection
from kedge.evaluate.judged import (
    Judged,
    judged_lines,
    judged_rate,
    judged_rates,
    length_report,
    majority,
    orders_report,
    preference_summary,
)
from kedge.evaluate.win_rates import share_interval


def judged(prompt: int, as_first: float | None, as_second: float | None, **more: Any) -> Judged:
    fields: dict[str, Any] = {"length": 10, "baseline_length": 10} | more
    return Judged(prompt=prompt, as_first=as_first, as_second=as_second, **fields)


def test_both_orders_make_one_verdict() -> None:
    """Wins on 0 and (half) 1, a tie on 2 by contradiction and on 3 by itself, a loss on 4; 5 cannot be read."""
    comparisons = [
        judged(0, 1, 1, length=12),
        judged(1, 1, 1, length=8),
        judged(1, 0, 0, length=9),
        judged(2, 1, 0),
        judged(3, 0.5, 0.5),
        judged(4, 0, 0, length=15),
        judged(5, None, 1),
    ]
    rate = judged_rate(comparisons)
    assert rate is not None
    per_prompt = [1.0, 0.5, 0.5, 0.5, 0.0]
    assert rate.rate == pytest.approx(0.5)
    assert (rate.wins, rate.ties, rate.losses) == pytest.approx((1.5 / 5, 2 / 5, 1.5 / 5))
    assert (rate.low, rate.high) == pytest.approx(share_interval(np.array(per_prompt)))
    assert (rate.prompts, rate.comparisons, rate.inconsistent, rate.unreadable) == (5, 7, 1, 1)
    # of verdicts with a winner, those for the place A: 0 (A, B), 1 (A, B) (B, A), 2 (A, A), 4 (B, A)
    assert rate.first_place == pytest.approx(6 / 10)
    # decided and of unlike length: 0 longer won, 1 shorter won, 1 shorter lost (the longer won), 4 longer lost
    assert rate.longer == pytest.approx(2 / 4)
    assert rate.weighted is None


def test_a_judge_of_whom_nothing_can_be_read_has_no_rate() -> None:
    assert judged_rate([judged(0, None, None)]) is None
    assert judged_rates({"j": {"m": [judged(0, None, 1)]}}) == {}


def test_probabilities_give_a_rate_of_their_own() -> None:
    rate = judged_rate([judged(0, 1, 1, probability=0.9), judged(1, 1, 0, probability=0.6), judged(1, 1, 1)])
    assert rate is not None
    assert rate.weighted is not None
    assert (rate.weighted.mean, rate.weighted.prompts) == (pytest.approx(0.75), 2)


def test_a_panel_decides_by_majority() -> None:
    first = [judged(0, 1, 1), judged(1, 1, 1), judged(2, 0, 0), judged(3, None, 1)]
    second = [judged(0, 1, 1), judged(1, 0, 0), judged(2, 1, 0), judged(3, None, None)]
    third = [judged(0, 0, 0), judged(1, 0.5, 0.5), judged(2, 0.5, 0.5), judged(3, None, None)]
    assert [one.preference for one in majority([first, second, third])] == [1.0, 0.5, 0.0, None]
    rates = judged_rates({"x": {"m": first}, "y": {"m": second}, "z": {"m": third}})
    assert list(rates["m"]) == ["x", "y", "z", "majority"]
    assert rates["m"]["majority"].rate == pytest.approx(0.5)
    assert rates["m"]["majority"].unreadable == 1
    assert list(judged_rates({"x": {"m": first}})["m"]) == ["x"]


def test_a_judge_that_likes_length_is_told_from_a_better_model() -> None:
    """Wins where it is longer and loses where it is shorter: at equal length it is no better."""
    comparisons = [
        judged(prompt, float(gap > 0), float(gap > 0), length=50 + gap)
        for prompt, gap in enumerate([30, 20, 25, 10, 15, -5, -10, 35, 40, -20] * 8)
    ]
    for comparison in comparisons[:3]:  # a length that decides everything cannot be told from anything
        comparisons.append(judged(comparison.prompt, 0, 0, length=90))
    rate = judged_rates({"j": {"m": comparisons}})["m"]["j"]
    assert rate.rate > 0.65
    assert rate.length_controlled is not None
    assert rate.length_controlled.mean < 0.55
    (line,) = judged_lines({"m": {"j": rate}}, "sft")
    assert line.startswith(f"j: m over sft {rate.rate:.1%} [")
    assert "at equal length; 0 inconsistent, 0 unreadable of 83" in line


def test_stored_verdicts_of_both_orders() -> None:
    """A tie in one order leaves it to the other, and is inconsistent; a contradiction decides nothing."""
    found = orders_report([(1, 1), (0, 0), (1, 0), (0.5, 1), (0, 0.5), (0.5, 0.5)], [1, 1, 1, 1, 0, 1])
    assert found.comparisons == 6
    assert found.right == pytest.approx(3 / 6)
    assert found.inconsistent == pytest.approx(3 / 6)


def test_preferences_as_a_leaderboard_reports_them() -> None:
    found = preference_summary([1.0, 0.75, 0.5, 0.25, 0.0, 0.5])
    assert found.win_rate == pytest.approx(0.5)
    # squares of the differences: 2 (½)² + 2 (¼)² = 0.625, over 5 and again over 6
    assert found.standard_error == pytest.approx((0.625 / 5 / 6) ** 0.5)
    assert found.discrete_win_rate == pytest.approx(0.5)


def test_a_judge_beside_people() -> None:
    """An unreadable reply is wrong, and a label of its own for κ."""
    people, judge = [1, 1, 1, 2, 2, 0], [1, 1, None, 2, 1, 0]
    found = agreement(people, judge)
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.macro_f1 == pytest.approx((2 * 2 / 6 + 2 * 1 / 3 + 1) / 3)
    expected = (3 * 3 + 2 * 1 + 1 * 1) / 36
    assert found.kappa == pytest.approx((4 / 6 - expected) / (1 - expected))
    assert cohen_kappa(["a", "a"], ["a", "a"]) == 1.0


def test_a_detector_beside_the_truth() -> None:
    found = detection([True, True, True, False, False], [True, True, False, True, False])
    assert (found.sensitivity, found.specificity) == (pytest.approx(2 / 3), pytest.approx(1 / 2))
    assert (found.observed, found.true) == (pytest.approx(3 / 5), pytest.approx(3 / 5))


def test_a_length_report_leaves_out_answers_of_equal_length() -> None:
    found = length_report([(1.0, 5, 5), (1.0, 6, 5), (0.0, 5, 9), (0.5, 1, 2), (0.0, 9, 5)])
    assert (found.first, found.second, found.ties, found.decided) == (2, 2, 1, 4)
    assert found.longer == pytest.approx(2 / 3)


DATA = os.environ.get("KEDGE_EVAL_DATA", "")


@pytest.mark.skipif(not DATA, reason="KEDGE_EVAL_DATA names no folder with public evaluation data")
def test_published_figures_are_found_again() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from evaluation_truth import figures  # pyright: ignore[reportMissingImports]

    assert [figure for figure in figures(Path(DATA)) if figure.is_ok is False] == []
