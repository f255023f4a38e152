"""One alarm an onset, exact resumption, switches, and how rarely it cries wolf."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog

Steady = Callable[..., list[dict[str, float]]]
ROOT = Path(__file__).parents[3]


def observe(watchdog: Watchdog, rows: list[dict[str, float]], first: int = 1) -> list[Alarm]:
    return [alarm for step, row in enumerate(rows, start=first) for alarm in watchdog.observe(step, row)]


def watchdog_of(**settings: object) -> Watchdog:
    return Watchdog(CATALOGUE, DetectorSettings.model_validate(settings), kl_target=6.0, kl_limit=12.0)


def test_a_fault_that_lasts_is_one_alarm_and_one_that_comes_back_is_another(steady: Steady) -> None:
    def fault(*spans: tuple[int, int]) -> list[dict[str, float]]:
        return steady(120, lambda step: {"length/truncated": 1.0} if any(a <= step < b for a, b in spans) else {})

    # The mean of 5 passes 0.5 with the third such step and falls below it with the third step after the last one.
    lasting = observe(watchdog_of(), fault((21, 80)))
    assert [(alarm.step, alarm.code) for alarm in lasting] == [(23, "answers.truncated")]
    # Quiet from 43 on; ten quiet steps, 43 to 52, arm it again.
    assert [alarm.step for alarm in observe(watchdog_of(), fault((21, 41), (51, 60)))] == [23, 53]
    assert [alarm.step for alarm in observe(watchdog_of(), fault((21, 41), (50, 60)))] == [23]


@pytest.mark.parametrize("cut", [1, 4, 5, 21, 24, 33, 50])
def test_a_resumed_watchdog_raises_the_same_alarms(steady: Steady, cut: int) -> None:
    rng = random.Random(11)
    rows = steady(
        80, lambda step: {"length/truncated": rng.random(), "kl/mean": 6 + 8 * rng.random(), "policy/loss": 1.0}
    )
    whole = observe(watchdog_of(), rows)
    assert len(whole) >= 3
    first, second = watchdog_of(), watchdog_of()
    before = observe(first, rows[:cut])
    second.load(json.loads(json.dumps(first.state())))
    assert before + observe(second, rows[cut:], first=cut + 1) == whole
    assert second.state() == json.loads(json.dumps(second.state()))


def test_what_a_state_holds_does_not_change_behind_its_back(steady: Steady) -> None:
    watchdog = watchdog_of()
    observe(watchdog, steady(10))
    state = watchdog.state()
    before = json.dumps(state)
    observe(watchdog, steady(10), first=11)
    assert json.dumps(state) == before


@pytest.mark.parametrize("code", [detector.code for detector in CATALOGUE])
def test_every_detector_has_a_switch(code: str) -> None:
    area, _, name = code.partition(".")
    assert DetectorSettings().threshold(code) is not None
    off = DetectorSettings.model_validate({area: {name: None}} if name else {area: False})
    assert off.threshold(code) is None
    others = [detector.code for detector in CATALOGUE if detector.code != code]
    assert all(off.threshold(other) == DetectorSettings().threshold(other) for other in others)


def test_a_switched_off_detector_is_silent_and_a_threshold_is_obeyed(steady: Steady) -> None:
    rows = steady(40, lambda step: {"length/truncated": 0.6})
    assert [alarm.code for alarm in observe(watchdog_of(), rows)] == ["answers.truncated"]
    assert observe(watchdog_of(answers={"truncated": None}), rows) == []
    assert observe(watchdog_of(answers={"truncated": 0.7}), rows) == []


def test_settings_refuse_what_makes_no_sense() -> None:
    for bad in ({"kl": {"over_target": 0.5}}, {"kl": {"ovr_target": 2.0}}, {"policy": {"clips_often": 1.5}}):
        with pytest.raises(ValidationError):
            DetectorSettings.model_validate(bad)


def test_an_alarm_says_what_why_and_what_next(steady: Steady) -> None:
    (alarm,) = observe(watchdog_of(), steady(40, length__mean=150.0))
    assert alarm.message == "answers have grown from 50 tokens at the start to 110"
    assert alarm.evidence == {"start": 50.0, "now": 110.0}
    event = alarm.as_event()
    assert (event["level"], event["code"], event["step"]) == ("warning", "answers.longer", 23)
    assert event["evidence"]["cause"] == alarm.cause
    assert "length penalty" in event["evidence"]["advice"]


def test_healthy_runs_are_left_in_peace() -> None:
    alarms_of = runpy.run_path(str(ROOT / "benchmarks/detector_false_alarms.py"))["alarms_of"]
    codes = [code for seed in range(20) for code in alarms_of(seed, steps=100, answers=64)]
    assert len(codes) <= 2
