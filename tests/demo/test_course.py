"""The course of runs that were made up by hand: what was best, how far it fell."""

from __future__ import annotations

import pytest

from kedge.demo import course


def rows(gold: list[float]) -> list[dict[str, float]]:
    return [
        {
            "step": at + 1,
            "gold/mean": truth,
            "reward/mean": float(at),
            "kl/mean": float(at * at),
            "length/mean": 30.0 + at,
        }
        for at, truth in enumerate(gold)
    ]


def test_the_best_is_a_mean_over_a_few_iterations_not_the_luckiest_one() -> None:
    start, best, end = course.start_best_end(rows([1.0, 2.0, 3.0, 9.0, 3.0, 2.0, 0.0, -1.0, -2.0, -3.0]))
    # Sums of 5: 18 for iterations 1 to 5, 19 for 2 to 6, 17, 13, 2, -4 for 6 to 10.
    assert (start.first, start.last, start.truth) == (1, 5, pytest.approx(3.6))
    assert (best.first, best.last, best.truth) == (2, 6, pytest.approx(3.8))
    # KL of iterations 6 to 10: (25 + 36 + 49 + 64 + 81) / 5.
    assert end == course.Point(first=6, last=10, truth=-0.8, proxy=7.0, kl=51.0, length=37.0)
    assert course.table(start, best, end) == [
        "            iterations  truth  proxy    KL  tokens",
        "start              1–5   3.60   2.00   6.0    32.0",
        "best truth         2–6   3.80   3.00  11.0    33.0",
        "end               6–10  -0.80   7.00  51.0    37.0",
    ]
    assert course.fall(best, end) == (
        "The truth was best at iteration 6, at a KL of 11.0 nats. It fell by 4.60 since, while the proxy rose by 4.00."
    )


def test_a_truth_that_still_rises_did_not_fall() -> None:
    _, best, end = course.start_best_end(rows([0.25 * n for n in range(1, 8)]))
    assert end.truth == pytest.approx(1.25)  # of iterations 3 to 7
    assert course.fall(best, end) == "The truth did not fall."


def test_a_run_shorter_than_a_mean_is_one_point() -> None:
    start, best, end = course.start_best_end(rows([1.0, 4.0]))
    assert start == best == end
    assert (end.first, end.last, end.truth, end.kl) == (1, 2, 2.5, 0.5)


def test_a_proxy_that_fell_too_is_said_to_fall() -> None:
    best = course.Point(first=1, last=5, truth=2.0, proxy=3.0, kl=1.0, length=20.0)
    end = course.Point(first=6, last=10, truth=1.0, proxy=2.5, kl=9.0, length=20.0)
    assert course.fall(best, end).endswith("It fell by 1.00 since, while the proxy fell by 0.50.")
