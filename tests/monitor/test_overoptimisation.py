"""The fit against curves whose α, β and peak are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
from overoptimised_runs import CASES, RUNS, attempt, untrue

from kedge.core.errors import DataError
from kedge.demo.recipe import write_demo
from kedge.monitor.overoptimisation import Fit, NoFit, fit, passed_peak, should_stop
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import Run

Kind = Literal["rl", "best_of_n"]


def curve(kind: Kind, alpha: float, beta: float, start: float) -> Callable[[float], float]:
    if kind == "rl":
        return lambda kl: start + math.sqrt(kl) * (alpha - beta * math.log(math.sqrt(kl))) if kl else start
    return lambda kl: start + math.sqrt(kl) * (alpha - beta * math.sqrt(kl))


def fitted(kl: list[float], gold: list[float], kind: Kind) -> Fit:
    curve_fit = fit(kl, gold, kind=kind)
    assert isinstance(curve_fit, Fit), curve_fit
    return curve_fit


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("rl", math.exp(2 * (1.2 / 0.8 - 1))),  # α − β ln d − β = 0 at d = e^(α/β − 1)
        ("best_of_n", (1.2 / 1.6) ** 2),  # α − 2 β d = 0
    ],
)
def test_a_curve_without_noise_is_found_exactly(kind: Kind, peak: float) -> None:
    kl = [0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    truth = curve(kind, 1.2, 0.8, -0.3)
    curve_fit = fitted(kl, [truth(nats) for nats in kl], kind)
    assert (curve_fit.law.alpha, curve_fit.law.beta, curve_fit.law.start) == pytest.approx((1.2, 0.8, -0.3), rel=1e-9)
    assert curve_fit.peak_kl == pytest.approx(peak, rel=1e-9)
    assert curve_fit.law.predicted(1.3) == pytest.approx(truth(1.69), rel=1e-9)
    assert curve_fit.law.predicted(0.0) == pytest.approx(-0.3, rel=1e-9)
    assert curve_fit.is_past_peak
    assert curve_fit.kl_left == pytest.approx(peak - 6, rel=1e-9)
    assert curve_fit.gold_left == pytest.approx(truth(peak) - truth(6.0), rel=1e-9)


@pytest.mark.parametrize(("kind", "alpha", "beta"), [("rl", 0.9, 0.5), ("best_of_n", 1.4, 0.3)])
@pytest.mark.parametrize("autocorrelation", [0.0, 0.15], ids=["white noise", "noise that lasts"])
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    kind: Kind, alpha: float, beta: float, autocorrelation: float
) -> None:
    rng, truth = random.Random(5), curve(kind, alpha, beta, 0.7)
    peak = math.exp(2 * (alpha / beta - 1)) if kind == "rl" else (alpha / (2 * beta)) ** 2
    kl = [12 * (step / 80) ** 2 for step in range(1, 81)]
    fits = list[Fit]()
    for _ in range(300):
        noise, gold = 0.0, list[float]()
        for nats in kl:
            noise = autocorrelation * noise + rng.gauss(0, 0.08)
            gold.append(truth(nats) + noise)
        if isinstance(curve_fit := fit(kl, gold, kind=kind), Fit):
            fits.append(curve_fit)
    # The test of the residuals refuses 1 % of white noise, and noise that lasts more often.
    assert len(fits) >= (291 if autocorrelation == 0 else 240), len(fits)
    hits = {
        "alpha": sum(one.alpha_interval[0] <= alpha <= one.alpha_interval[1] for one in fits),
        "beta": sum(one.beta_interval[0] <= beta <= one.beta_interval[1] for one in fits),
        "start": sum(one.start_interval[0] <= 0.7 <= one.start_interval[1] for one in fits),
        "peak": sum(one.peak_kl_interval[0] <= peak <= one.peak_kl_interval[1] for one in fits),
    }
    # 95 % of 300 is 285, with a standard deviation of 3.8; lasting noise is estimated from 80 points, which is not
    # enough to undo all of it.
    assert all(0.90 <= hit / len(fits) <= 0.995 for hit in hits.values()), hits


@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_a_seed_of_the_demo_is_true(case: str) -> None:
    assert attempt(case) is None


@pytest.mark.slow
def test_what_is_said_of_a_fresh_seed_is_true(tmp_path: Path) -> None:
    recipe = write_demo(tmp_path, 41, version="overoptimised")
    before_evaluation, _, _ = recipe.read_text().partition("  # The same held-out messages")
    recipe.write_text(before_evaluation)
    home = run_recipe(load_recipe(recipe), tmp_path / "runs", is_resumed=False, say=lambda _: None)
    rows = Run.open(home / "ppo", for_writing=False).read_metrics()
    assert untrue([(row["kl/mean"], row["gold/mean"], row["reward/mean"]) for row in rows]) is None


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_points_after_a_collapse_do_not_decide(noise: float) -> None:
    """The law up to 20 nats, then gold that stays where it fell to: where the peak was is still known."""
    rng, truth = random.Random(4), curve("rl", 2.0, 1.2, 0.5)
    kl = [0.5 * step for step in range(1, 121)]
    gold = [(truth(nats) if nats < 20 else -4.0 + 0.02 * nats) + rng.gauss(0, noise) for nats in kl]
    peak = math.exp(2 * (2.0 / 1.2 - 1))
    curve_fit = fitted(kl, gold, "rl")
    assert curve_fit.holds_until is not None
    assert 10 < curve_fit.holds_until < 26
    assert curve_fit.peak_kl_interval[0] <= peak <= curve_fit.peak_kl_interval[1]
    assert curve_fit.observed is not None
    assert curve_fit.observed.has_fallen
    assert curve_fit.observed.kl_interval[0] <= peak <= curve_fit.observed.kl_interval[1]


def test_where_gold_was_best_is_known_without_the_law() -> None:
    """A tent with its top at 4 nats; the law does not bend so sharply."""
    rng = random.Random(9)
    kl = [0.2 * step for step in range(1, 101)]
    gold = [min(math.sqrt(nats), 2.0) - 2 * max(0.0, math.sqrt(nats) - 2.0) + rng.gauss(0, 0.1) for nats in kl]
    observed = fit(kl, gold, kind="rl").observed
    assert observed is not None
    assert observed.kl_interval[0] <= 4.0 <= observed.kl_interval[1]
    assert observed.kl_interval[1] < 6.0
    assert "gold was best at a KL of" in observed.in_words()
    rising = fit(kl, [math.sqrt(nats) + rng.gauss(0, 0.1) for nats in kl], kind="rl").observed
    assert rising is not None
    assert "has not fallen" in rising.in_words()


def test_a_run_whose_gold_fell_otherwise_than_by_the_law_is_past_its_peak() -> None:
    rows = [{"kl/mean": kl, "gold/mean": gold} for kl, gold, _ in RUNS["19"]]
    peak = passed_peak(rows)
    assert peak is not None
    assert not peak.is_predicted
    assert peak.kl_interval[0] <= peak.kl <= peak.kl_interval[1] < peak.kl_now
    assert passed_peak(rows[:14]) is None


def test_gold_that_only_rises_gives_no_peak() -> None:
    rng = random.Random(3)
    kl = [0.1 * step for step in range(1, 61)]
    curve_fit = fit(kl, [0.5 * math.sqrt(nats) + rng.gauss(0, 0.05) for nats in kl], kind="best_of_n")
    assert isinstance(curve_fit, NoFit)
    assert "not shown to be above 0" in curve_fit.reason
    assert not should_stop(curve_fit, 100.0)


def test_gold_that_falls_from_the_start_has_no_peak_to_look_for() -> None:
    kl = [0.1 * step for step in range(1, 31)]
    curve_fit = fit(kl, [-math.sqrt(nats) - 0.1 * nats for nats in kl], kind="best_of_n")
    assert isinstance(curve_fit, NoFit)
    assert "falls from the start" in curve_fit.reason


def test_a_peak_far_beyond_the_data_is_not_predicted() -> None:
    kl = [0.01 * step for step in range(1, 31)]
    truth = curve("rl", 3.0, 1.0, 0.0)  # its peak is at e^4 = 54.6 nats, the data ends at 0.3
    curve_fit = fit(kl, [truth(nats) for nats in kl], kind="rl")
    assert isinstance(curve_fit, NoFit)
    assert "0.3 nats" in curve_fit.reason


@pytest.mark.parametrize(
    ("kl", "says"),
    [
        ([0.5 * step for step in range(11)], "11 usable points; 12 are needed"),
        ([4 + 0.1 * step for step in range(20)], "from 4 to 5.9 nats"),
        ([-0.1] * 30 + [1.0, 2.0], "2 usable points"),
        ([1.0, 9.0] * 20, "2 different values of KL"),
    ],
)
def test_too_little_says_why(kl: list[float], says: str) -> None:
    curve_fit = fit(kl, [math.sqrt(max(nats, 0)) for nats in kl], kind="rl")
    assert isinstance(curve_fit, NoFit)
    assert says in curve_fit.reason


def test_unusable_points_are_left_out_and_counted() -> None:
    truth = curve("rl", 1.0, 0.5, 0.0)
    kl = [0.3 * step for step in range(1, 21)]
    gold = [truth(nats) for nats in kl]
    curve_fit = fitted([-0.2, *kl, math.nan, 1.0], [9.0, *gold, 1.0, math.inf], "rl")
    assert (curve_fit.law.num_points, curve_fit.num_left_out) == (20, 3)
    assert curve_fit.law.alpha == pytest.approx(1.0, rel=1e-9)
    assert curve_fit.kl == 6.0


def test_a_run_is_stopped_at_the_peak_and_not_before() -> None:
    truth = curve("rl", 1.0, 0.5, 0.0)  # peak at e^2 = 7.389 nats
    kl = [0.3 * step for step in range(1, 21)]
    curve_fit = fitted(kl, [truth(nats) for nats in kl], "rl")
    assert not curve_fit.is_past_peak
    assert [should_stop(curve_fit, nats) for nats in (6.0, 7.38, 7.39)] == [False, False, True]


def test_a_run_is_not_stopped_by_a_peak_that_is_hardly_known() -> None:
    rng, truth = random.Random(2), curve("rl", 1.0, 0.667, 0.0)  # peak at e^(2 (1.5 − 1)) = 2.7 nats
    kl = [0.2 * step for step in range(1, 31)]

    def noisy(noise: float) -> Fit:
        return fitted(kl, [truth(nats) + rng.gauss(0, noise) for nats in kl], "rl")

    vague, sure = noisy(0.08), noisy(0.02)
    assert vague.peak_kl_interval[1] > 2 * vague.peak_kl_interval[0]
    assert not should_stop(vague, 100.0)
    assert sure.peak_kl_interval[1] < 2 * sure.peak_kl_interval[0]
    assert should_stop(sure, 3.0)


def test_scores_and_kl_must_come_in_pairs() -> None:
    with pytest.raises(DataError, match="3 KL values for 2 gold scores"):
        fit([1.0, 2.0, 3.0], [1.0, 2.0], kind="rl")


def test_a_run_past_the_peak_of_its_gold_score_is_told_so() -> None:
    """R = 1 + d (2 - 1 ln d), d = sqrt(KL): the peak is at ln d = 1, a KL of e^2 = 7.39."""
    points = [
        {"kl/mean": kl, "gold/mean": 1 + math.sqrt(kl) * (2 - math.log(math.sqrt(kl))) + 0.01 * (-1) ** number}
        for kl, number in zip((0.5 * step for step in range(1, 40)), count(), strict=False)
    ]
    assert passed_peak(points[:8]) is None
    assert passed_peak([{"kl/mean": 3.0}]) is None
    found = passed_peak(points)
    assert found is not None
    assert found.is_predicted
    assert math.isclose(found.kl, math.e**2, rel_tol=0.1)


def test_a_long_run_is_thinned_and_says_the_same() -> None:
    rng, truth = random.Random(8), curve("rl", 1.0, 0.667, 0.0)  # peak at 2.7 nats
    kl = [0.0005 * step for step in range(1, 20_001)]
    curve_fit = fitted(kl, [truth(nats) + rng.gauss(0, 0.3) for nats in kl], "rl")
    assert curve_fit.law.num_points == 1000
    assert curve_fit.num_left_out == 0
    assert curve_fit.peak_kl_interval[0] <= math.exp(2 * (1 / 0.667 - 1)) <= curve_fit.peak_kl_interval[1]
