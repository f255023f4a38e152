"""Every detector speaks at the step that its rule says, worked out by hand, and not just below its threshold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest

from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog
from kedge.monitor.detectors.watchdog import Window, trend

Steady = Callable[..., list[dict[str, float]]]
Only = Callable[[str], DetectorSettings]

# code, metric, value from step 21 on, the step of the alarm, a value that is just not enough
ONSETS = [
    ("kl.over_target", "kl/mean", 10.0, 29, 9.0),  # 10 k + 4 (10 - k) > 90 at k = 9
    ("kl.near_limit", "kl/mean", 12.0, 23, 9.6),  # 12 k + 4 (3 - k) > 28.8 at k = 3
    ("kl.no_room", "kl/coef", 20.0, 22, 7.0),  # 1 / 2 c^2 < 0.01 at c > 7.07; 19.9 k + 0.5 > 35.4 at k = 2
    ("kl.negative", "kl/mean", -1.0, 25, -0.1),  # -k + 4 (5 - k) < -0.5 at k = 5
    ("reward.length_correlation", "reward/length_correlation", 0.9, 27, 0.6),  # 0.8 k + 1 > 6 at k = 7
    ("reward.scale", "reward/std", 31.0, 22, 10.0),  # 30 k + 5 > 50 at k = 2
    ("reward.scale_drift", "reward/std", 5.0, 26, 3.0),  # 4 k + 10 > 30 at k = 6
    ("reward.out_of_range", "reward/out_of_range", 0.5, 23, 0.25),  # 0.48 k + 0.1 > 1.25 at k = 3
    ("reward.disagreement", "reward/disagreement", 0.8, 24, 0.4),  # 0.6 k + 2 > 4 at k = 4
    ("reward.unscored", "reward/unscored", 0.3, 22, 0.1),  # 0.3 k > 0.5 at k = 2
    ("answers.longer", "length/mean", 120.0, 24, 100.0),  # 70 k + 250 > 500 at k = 4
    ("answers.truncated", "length/truncated", 1.0, 23, 0.5),  # 0.9 k + 0.5 > 2.5 at k = 3
    ("answers.repetition", "repetition/mean", 0.5, 22, 0.2),  # 0.48 k + 0.1 > 1 at k = 2
    ("answers.less_distinct", "distinct/mean", 0.1, 24, 0.25),  # 2.5 - 0.4 k < 1.25 at k = 4
    ("answers.alike", "similarity/mean", 0.9, 23, 0.5),  # 0.8 k + 0.5 > 2.5 at k = 3
    ("prompts.repeated", "prompts/repeated", 1.0, 30, 0.9),  # k > 9 at k = 10
    ("policy.entropy_collapse", "entropy/mean", 0.1, 25, 0.4),  # 10 - 1.9 k < 2 at k = 5
    ("policy.clips_often", "policy/clip_fraction", 0.6, 23, 0.3),  # 0.55 k + 0.25 > 1.5 at k = 3
    ("policy.large_steps", "policy/approx_kl", 0.25, 22, 0.0999),  # 0.245 k + 0.015 > 0.3 at k = 2
    ("policy.never_clips", "policy/clip_fraction", 0.0, 40, 1e-9),  # twenty steps from 21 on
    ("policy.mismatch", "policy/mismatch", 0.2, 21, 0.0499),  # 0.2 > 3 × 0.05
    ("policy.gradient_spike", "policy/grad_norm", 11.0, 21, 10.0),
    ("value.gradient_spike", "value/grad_norm", 11.0, 21, 10.0),
    ("value.loss_explodes", "value/loss", 9.0, 22, 5.0),  # 8.5 k + 1.5 > 15 at k = 2
    ("value.explains_nothing", "value/explained_variance", -0.5, 25, 0.01),  # 5 - k < 0.1 at k = 5
    ("not_finite", "policy/loss", math.nan, 21, 1e300),
]


def alarms(settings: DetectorSettings, rows: list[dict[str, float]], **kl: float | None) -> list[tuple[int, str]]:
    watchdog = Watchdog(CATALOGUE, settings, kl_target=kl.get("target"), kl_limit=kl.get("limit"))
    return [(alarm.step, alarm.code) for step, row in enumerate(rows, start=1) for alarm in watchdog.observe(step, row)]


@pytest.mark.parametrize(("code", "metric", "value", "at", "enough"), ONSETS, ids=[onset[0] for onset in ONSETS])
def test_the_alarm_comes_at_the_step_of_its_rule(
    steady: Steady, only: Only, code: str, metric: str, value: float, at: int, enough: float
) -> None:
    rows = steady(60, lambda step: {metric: value} if step > 20 else {})
    assert alarms(only(code), rows, target=6.0, limit=12.0) == [(at, code)]
    quiet = steady(60, lambda step: {metric: enough} if step > 20 else {})
    assert alarms(only(code), quiet, target=6.0, limit=12.0) == []


def test_a_policy_that_has_not_moved_after_twenty_steps_is_reported(steady: Steady, only: Only) -> None:
    assert alarms(only("kl.near_zero"), steady(40, lambda _: {"kl/mean": 0.009})) == [(20, "kl.near_zero")]
    assert alarms(only("kl.near_zero"), steady(40, lambda _: {"kl/mean": -0.009})) == [(20, "kl.near_zero")]
    assert alarms(only("kl.near_zero"), steady(40, lambda _: {"kl/mean": 0.011})) == []


def rising(step: int) -> Mapping[str, float]:
    """A reward that rises from 1 to 5 with a noise of 0.1 beside a spread of 1 at the start."""
    return {"reward/mean": 1 + 4 * min(step, 20) / 20 + 0.1 * (-1) ** step}


def test_a_kl_that_is_too_small_for_what_the_reward_did_is_of_a_reference_that_moves(
    steady: Steady, only: Only
) -> None:
    code = "kl.reference_follows"
    # The first five steps average 1.58, steps 16 to 20 average 4.62: (3.04 / 1)² / 2 = 4.6 nats at least, a tenth is
    # 0.46; in the end (3.42 / 1)² / 2 = 5.8.
    assert alarms(only(code), steady(40, lambda step: {**rising(step), "kl/mean": 0.4})) == [(20, code)]
    assert alarms(only(code), steady(40, lambda step: {**rising(step), "kl/mean": 0.6})) == []
    assert alarms(only(code), steady(40, lambda _: {"kl/mean": 0.0})) == []  # nothing has moved
    frozen = only("kl.near_zero")
    assert alarms(frozen, steady(40, lambda step: {**rising(step), "kl/mean": 0.0})) == []  # the policy has moved


def test_a_reward_that_most_answers_exhaust_from_the_start_is_saturated(steady: Steady, only: Only) -> None:
    code = "reward.saturated"
    assert alarms(only(code), steady(40, lambda _: {"reward/at_limit": 0.7})) == [(10, code)]
    assert alarms(only(code), steady(40, lambda _: {"reward/at_limit": 0.6})) == []
    learnt = steady(40, lambda step: {"reward/at_limit": 1.0 if step > 20 else 0.1})
    assert alarms(only(code), learnt) == []  # a ceiling that was reached by learning


def test_scores_that_have_nothing_to_do_with_gold_are_seen_at_the_start(steady: Steady, only: Only) -> None:
    code = "reward.unrelated"
    assert alarms(only(code), steady(40, lambda _: {"reward/gold_correlation": 0.1})) == [(10, code)]
    assert alarms(only(code), steady(40, lambda _: {"reward/gold_correlation": -0.19})) == [(10, code)]
    assert alarms(only(code), steady(40, lambda _: {"reward/gold_correlation": 0.21})) == []
    used_up = steady(40, lambda step: {"reward/gold_correlation": 0.0 if step > 5 else 0.6})
    assert alarms(only(code), used_up) == []


def test_answers_that_never_end_do_so_from_the_first_step(steady: Steady, only: Only) -> None:
    code = "answers.never_end"
    assert alarms(only(code), steady(40, lambda _: {"length/truncated": 0.96})) == [(5, code)]
    assert alarms(only(code), steady(40, lambda step: {"length/truncated": 0.9 if step == 1 else 1.0})) == []


@pytest.mark.parametrize(("precision", "mismatch"), [("float32", 0.005), ("float16", 0.02), ("bfloat16", 0.05)])
def test_a_mismatch_is_judged_by_the_precision_in_use(
    steady: Steady, only: Only, precision: str, mismatch: float
) -> None:
    def codes(value: float) -> set[str]:
        watchdog = Watchdog(CATALOGUE, only("policy.mismatch"), kl_target=None, kl_limit=None, precision=precision)
        rows = steady(10, lambda _: {"policy/mismatch": value})
        return {alarm.code for step, row in enumerate(rows, start=1) for alarm in watchdog.observe(step, row)}

    assert codes(1.1 * mismatch) == {"policy.mismatch"}
    assert codes(0.9 * mismatch) == set()


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0), (3.0, 20)])
def test_rounding_to_bfloat16_is_no_mismatch_and_more_than_it_explains_is_one(
    only: Only, factor: float, expected: int
) -> None:
    """0.03 nats a token is what a small real model shows, with noise from step to step; a fault adds to it."""
    raised = 0
    for seed in range(20):
        rng = random.Random(seed)
        watchdog = Watchdog(CATALOGUE, only("policy.mismatch"), kl_target=None, kl_limit=None, precision="bfloat16")
        values = [factor * 0.03 * rng.lognormvariate(0, 0.2) for _ in range(200)]
        raised += any(watchdog.observe(step, {"policy/mismatch": value}) for step, value in enumerate(values, start=1))
    assert raised == expected


def test_a_mismatch_is_judged_of_answers_of_the_policy_itself(steady: Steady, only: Only) -> None:
    code, (age, mismatch) = "policy.mismatch", ("age/mean", "policy/mismatch")

    def aged(lag: int, first: float, later: float) -> list[dict[str, float]]:
        """Under a lag the first batch alone is of age 0; `later` stands for what the policy has moved since."""
        return steady(10, lambda step: {age: float(min(step - 1, lag)), mismatch: first if step == 1 else later})

    assert alarms(only(code), aged(1, 1e-6, 0.4)) == []
    assert alarms(only(code), aged(2, 1e-6, 0.4)) == []
    assert alarms(only(code), aged(1, 0.4, 0.4)) == [(2, code)]  # once it is clear that no more of age 0 comes
    assert alarms(only(code), aged(1, 0.09, 0.09)) == []  # one batch has twice the room: 0.1
    assert alarms(only(code), aged(0, 0.09, 0.09)) == [(3, code)]  # always new: as without ages
    # Rows that lack the metric where they are old, as a run writes them.
    rows = [{name: value for name, value in row.items() if name != mismatch or not row[age]} for row in aged(1, 0.4, 0)]
    assert alarms(only(code), rows) == [(2, code)]


def test_kl_runs_away_when_it_doubles_within_a_few_steps_far_out(steady: Steady, only: Only) -> None:
    def climbing(step: int) -> Mapping[str, float]:
        return {"kl/mean": 4 * 1.5 ** max(0, step - 20)}  # 6, 9, 13.5, 20.25 from step 21 on

    # Step 23: (6 + 9 + 13.5) / 3 = 9.5 is below the 10 nats of a run without a target; step 24: 14.25 > 2 × 4.4.
    assert alarms(only("kl.running_away"), steady(30, climbing)) == [(24, "kl.running_away")]
    # With a target of 12 the floor is 18: step 25 has (13.5 + 20.25 + 30.375) / 3 = 21.4 > 2 × 5.4.
    assert alarms(only("kl.running_away"), steady(30, climbing), target=12.0) == [(25, "kl.running_away")]
    slow = steady(60, lambda step: {"kl/mean": 0.5 * step})  # at 20 nats and more, and never twice what it was
    assert alarms(only("kl.running_away"), slow) == []


def test_policy_and_reference_begin_as_one(steady: Steady, only: Only) -> None:
    rows = steady(10)
    assert alarms(only("kl.not_zero_at_start"), rows) == []  # 0 in the first step, 4 in the second
    for kl, expected in ((-0.2, [(1, "kl.not_zero_at_start")]), (0.2, [(1, "kl.not_zero_at_start")]), (-0.09, [])):
        assert alarms(only("kl.not_zero_at_start"), [rows[0] | {"kl/mean": kl}, *rows[1:]]) == expected


def test_normalised_scores_have_a_spread_of_one_whatever_they_were(steady: Steady, only: Only) -> None:
    rows = steady(30, lambda _: {"reward/std": 100.0, "kl/coef": 20.0})

    def codes(score_std: float | None, code: str) -> list[int]:
        watchdog = Watchdog(CATALOGUE, only(code), kl_target=None, kl_limit=None, score_std=score_std)
        return [alarm.step for step, row in enumerate(rows, start=1) for alarm in watchdog.observe(step, row)]

    # 100^2 / (2 x 20^2) = 12.5 nats; with a spread of 1, 0.00125.
    assert (codes(None, "kl.no_room"), codes(1.0, "kl.no_room")) == ([], [5])
    assert (codes(None, "reward.scale"), codes(1.0, "reward.scale")) == ([5], [])


def test_scores_are_constant_only_where_they_were_so_from_the_start(steady: Steady, only: Only) -> None:
    assert alarms(only("reward.constant"), steady(30, lambda _: {"reward/std": 1e-8})) == [(10, "reward.constant")]
    assert alarms(only("reward.constant"), steady(30, lambda _: {"reward/std": 1e-5})) == []
    solved = steady(60, lambda step: {"reward/std": 0.0 if step > 5 else 0.4})
    assert alarms(only("reward.constant"), solved) == []


def test_a_critic_that_overshoots_from_the_start(steady: Steady, only: Only) -> None:
    code = "value.worse_than_nothing"
    explains = "value/explained_variance"
    rows = steady(12, lambda step: {"value/loss": 0.5 if step == 1 else 1.85, explains: 0.1})  # 0 costs (1 + 1) / 2
    assert alarms(only(code), rows) == [(2, code)]
    assert alarms(only(code), [row | {explains: 0.9} for row in rows]) == []  # of use, whatever its loss is
    assert alarms(only(code), steady(12, lambda step: {"value/loss": 1.75})) == []
    assert alarms(only(code), steady(12, lambda step: {"value/loss": 9.0 if step > 5 else 0.5})) == []
    scaled = Watchdog(CATALOGUE, only(code), kl_target=None, kl_limit=None, score_std=1.0)
    assert [alarm for step, row in enumerate(rows, start=1) for alarm in scaled.observe(step, row)] == []


def test_a_reward_that_falls_by_more_than_its_noise(steady: Steady, only: Only) -> None:
    def dropped(to: float) -> list[dict[str, float]]:
        return steady(40, lambda step: {"reward/mean": (to if step > 20 else 1.0) + 0.1 * (-1) ** step})

    # The median step is 0.2, so the noise of one value 1.4826 x 0.2 / sqrt(2) = 0.2097 and six standard errors of the
    # difference of two means of five 6 x 0.2097 x sqrt(2/5) = 0.796. The first five average 0.98: 0.184 is the bound.
    # Steps 20 to 24 average (1.1 + 0) / 5 = 0.22, steps 21 to 25 average -0.02.
    assert alarms(only("reward.falls"), dropped(0.0)) == [(25, "reward.falls")]
    assert alarms(only("reward.falls"), dropped(0.22)) == []


def test_gold_that_falls_within_three_steps_and_stays_there(steady: Steady, only: Only) -> None:
    course = {21: 2.9, 22: 1.7, 23: 0.9}  # as a reward model was seen to be hacked: from 3.7 to 1.3 and no further

    def hacked(step: int) -> dict[str, float]:
        gold = min(3.7, 1 + 0.2 * step) if step < 21 else course.get(step, 1.3)
        return {"reward/mean": 0.1 * step, "gold/mean": gold + 0.1 * (-1) ** step}

    # Steps of 0 or 0.4 in turn while gold rises, of 0.2 on the plateau: a median of at most 0.4, so that eight standard
    # errors are at most 2.1. The best five average about 3.7; steps 20 to 24 average (3.8 + 2.8 + 1.8 + 0.8 + 1.4) / 5.
    ((step, _),) = alarms(only("reward.gold_falls"), steady(60, hacked))
    assert step in (23, 24)


def test_a_reward_against_gold_is_told_from_one_that_is_exploited(steady: Steady, only: Only) -> None:
    def rows(gold: Callable[[int], float]) -> list[dict[str, float]]:
        return steady(60, lambda step: {"reward/mean": 0.1 * step, "gold/mean": gold(step) + 0.05 * (-1) ** step})

    (alarm,) = alarms(only("reward.against_gold"), rows(lambda step: -0.1 * step))
    assert 10 <= alarm[0] <= 15
    assert alarms(only("reward.against_gold"), rows(lambda step: 0.1 * min(step, 30 - step))) == []  # rises first
    assert alarms(only("reward.against_gold"), rows(lambda step: 0.1 * min(0, 20 - step))) == []  # is level first
    assert alarms(only("reward.against_gold"), rows(lambda step: 0.1 * step)) == []
    # Noise 0.105, a standard error 0.066: a dip of 0.2 is more than two of them and less than five; then it rises.
    dips = rows(lambda step: (0.0 if step < 6 else -0.2) if step < 19 else (1.0 if step < 30 else -2.0))
    assert alarms(only("reward.against_gold"), dips) == []
    late = rows(lambda step: -0.1 * step if step > 45 else 0.0)
    assert alarms(only("reward.against_gold"), late) == []


def test_gold_that_falls_while_the_reward_is_up(steady: Steady, only: Only) -> None:
    def hacked(step: int) -> dict[str, float]:
        wobble = 0.02 * (-1) ** step
        return {"reward/mean": 0.01 * step, "gold/mean": 1 + wobble - 0.02 * max(0, step - 20)}

    # The median step is 0.04, later 0.06 and 0.02 in turn: noise 0.042, eight standard errors 0.212. The last five
    # average 1 - 0.02 (step - 22): 0.2 below at step 32, 0.22 at step 33, give or take the wobble.
    (alarm,) = alarms(only("reward.gold_falls"), steady(60, hacked))
    assert alarm[0] in (32, 33)

    def both_fall(step: int) -> dict[str, float]:
        return hacked(step) | {"reward/mean": 1 - 0.01 * step}

    assert alarms(only("reward.gold_falls"), steady(60, both_fall)) == []

    def never_rose(step: int) -> dict[str, float]:
        return hacked(step) | {"reward/mean": 1.0 if step <= 5 else 0.5 + 0.001 * step}

    def has_turned(step: int) -> dict[str, float]:
        return hacked(step) | {"reward/mean": 0.0 if step <= 5 else 20 - 0.2 * step}

    assert alarms(only("reward.gold_falls"), steady(60, never_rose)) == []
    assert alarms(only("reward.gold_falls"), steady(60, has_turned)) == []
    seldom = [row if step % 3 == 0 else {k: v for k, v in row.items() if k != "gold/mean"} for step, row in
              enumerate(steady(90, hacked), start=1)]  # fmt: skip
    (alarm,) = alarms(only("reward.gold_falls"), seldom)
    assert alarm[0] % 3 == 0


def test_nothing_is_said_about_a_steady_run(steady: Steady) -> None:
    assert alarms(DetectorSettings(), steady(100), target=6.0, limit=12.0) == []


@pytest.mark.parametrize("metric", ["kl/mean", "gold/mean", "reward/disagreement", "value/loss", "policy/mismatch"])
def test_a_metric_that_a_run_does_not_have_is_not_missed(steady: Steady, metric: str) -> None:
    rows = [{name: value for name, value in row.items() if name != metric} for row in steady(60)]
    assert alarms(DetectorSettings(), rows, target=6.0, limit=12.0) == []
    assert alarms(DetectorSettings(), [{} for _ in range(60)], target=6.0, limit=12.0) == []


def test_every_detector_is_tried_here() -> None:
    tried = {onset[0] for onset in ONSETS} | {
        *("kl.near_zero", "kl.not_zero_at_start", "kl.reference_follows", "kl.running_away"),
        *("answers.never_end", "reward.saturated", "reward.unrelated"),
        *("reward.against_gold", "reward.constant", "reward.falls", "reward.gold_falls", "value.worse_than_nothing"),
        *("exam.tax", "judge.falls"),  # test_exam_rules.py
    }
    assert tried == {detector.code for detector in CATALOGUE}


def test_a_trend_counts_less_where_noise_lasts() -> None:
    # Residuals +1 -1 -1 +1 ... around a line of slope 1 are less autocorrelated than + + - -: the second t is smaller.
    quick = [x + (1, -1, -1, 1)[x % 4] for x in range(20)]
    lasting = [x + (1, 1, 1, 1, 1, -1, -1, -1, -1, -1)[x % 10] for x in range(20)]
    assert trend(lasting) < 0.75 * trend(quick)
    assert trend([1.0, 2.0, 3.0, 4.0]) == math.inf
    assert trend([4.0, 3.0, 2.0, 1.0]) == -math.inf
    assert trend([2.0] * 9) == 0.0


def test_values_that_are_not_finite_stay_out_of_averages() -> None:
    rows = [{"kl/mean": kl} for kl in (1.0, math.nan, 3.0, math.inf, 5.0)]
    window = Window(start=rows, latest=rows[-1], column=lambda name: [row[name] for row in rows], num_steps=10)
    assert window.mean("kl/mean", 3) == 3.0
    assert window.early("kl/mean") == 3.0
    assert window.mean("kl/mean", 4) is None
    assert window.before("kl/mean", last=1, at_most=20, at_least=2) == 2.0
