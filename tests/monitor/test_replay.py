"""The doctor on long runs: the telling steps give the alarms that all steps give."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kedge.core.metric_table import MetricTable
from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog
from kedge.monitor.doctor import replay as replaying
from kedge.monitor.doctor.replay import replay, telling_rows

LONG = 6000


def steady(steps: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "step": step,
            "reward/mean": 1 + rng.gauss(0, 0.05),
            "reward/std": 0.8 + rng.gauss(0, 0.02),
            "kl/mean": 4 + rng.gauss(0, 0.2),
            "kl/coef": 0.05,
            "length/mean": 40 + rng.gauss(0, 1),
            "length/truncated": 0.02,
            "entropy/mean": 2 + rng.gauss(0, 0.03),
            "repetition/mean": 0.02,
            "distinct/mean": 0.8 + rng.gauss(0, 0.01),
            "similarity/mean": 0.1,
            "policy/clip_fraction": 0.1 + rng.gauss(0, 0.01),
            "policy/approx_kl": 0.008,
            "policy/grad_norm": 1 + rng.gauss(0, 0.05),
            "value/loss": 0.2,
            "value/explained_variance": 0.7 + rng.gauss(0, 0.02),
        }
        for step in range(1, steps + 1)
    ]


def watchdog() -> Watchdog:
    return Watchdog(CATALOGUE, DetectorSettings(), kl_target=6.0, kl_limit=12.0)


FAULTS: dict[str, tuple[str, int, int, float]] = {
    "answers grow": ("length/mean", 3000, LONG, 200.0),
    "answers grow for a while": ("length/mean", 2980, 3030, 200.0),
    "cut off": ("length/truncated", 3500, 3600, 0.9),
    "kl runs away": ("kl/mean", 4000, LONG, 11.5),
    "repetition": ("repetition/mean", 2500, 2540, 0.6),
    "one gradient": ("policy/grad_norm", 3333, 3334, 500.0),
    "not finite": ("reward/mean", 2750, 2760, math.nan),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if number % 3 == 0 else pytest.mark.slow) for number, fault in enumerate(FAULTS)],
)
def test_telling_steps_find_what_all_steps_find(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, start, end, value = FAULTS[fault]
    rows = steady(LONG, seed=3)
    for row in rows[start:end]:
        row[name] = value
    sparse = replay(watchdog(), rows, [])
    monkeypatch.setattr(replaying, "MOST_STEPS", LONG)
    full = replay(watchdog(), rows, [])
    first = {alarm.code: alarm.step for alarm in reversed(full)}
    again = {alarm.code: alarm.step for alarm in reversed(sparse)}
    assert first
    assert {code for code, step in first.items() if step > start} <= again.keys()
    assert all(abs(again[code] - step) <= LONG / 20 for code, step in first.items() if code in again)


def test_a_long_steady_run_raises_no_more_than_all_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = steady(LONG, seed=5)
    sparse = {alarm.code for alarm in replay(watchdog(), rows, [])}
    monkeypatch.setattr(replaying, "MOST_STEPS", LONG)
    assert sparse <= {alarm.code for alarm in replay(watchdog(), rows, [])}


def test_the_steps_of_the_runs_own_alarms_are_looked_at() -> None:
    table = MetricTable(steady(LONG, seed=7))
    columns = {name: table.values(name) for name in table.names if "/" in name}
    assert 4321 - 1 in telling_rows(table, columns, [4321, 10**9])
    assert len(telling_rows(table, columns, [])) < LONG / 3


def test_a_replay_raises_what_a_watchdog_raises_step_by_step() -> None:
    rows = steady(400, seed=9)
    for row in rows[::3]:
        row["gold/mean"] = 1 - row["step"] / 400
    for row in rows[200:260]:
        row |= {"length/truncated": 0.9, "policy/grad_norm": 50.0}
    rows[300]["reward/mean"] = math.nan
    del rows[310]["kl/mean"]
    live = watchdog()
    alarms = [alarm for row in rows for alarm in live.observe(row["step"], row)]
    assert {"reward.gold_falls", "answers.truncated", "not_finite"} <= {alarm.code for alarm in alarms}
    assert replay(watchdog(), rows, []) == alarms
