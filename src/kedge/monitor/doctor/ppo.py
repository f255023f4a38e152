"""Diagnosis of PPO: the detectors replayed over the whole history, and the cause that explains most of what they saw.

Replaying, and not reading old alarms, judges every run by the same rules, also one that ran without detectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors import DetectorSettings, Watchdog
from kedge.monitor.detectors.watchdog import READ
from kedge.monitor.doctor.ppo_causes import SUSPECTS, Suspect
from kedge.monitor.doctor.ppo_changes import Facts
from kedge.monitor.doctor.ppo_events import said
from kedge.monitor.doctor.recipes import number_at, value_at
from kedge.monitor.doctor.records import Cause, Change, History
from kedge.monitor.overoptimisation import Fit, TooLittle, fit

ENOUGH_STEPS = 20
"""Steps after which every rule has had its say."""


def replayed(history: History) -> list[Alarm]:
    """Every alarm of the run, by its own thresholds where they can be read."""
    is_scaled = value_at(history.settings, "scores.normalise") not in (None, "none")
    dog = Watchdog(
        _settings(history.settings),
        kl_target=number_at(history.settings, "kl.target"),
        kl_limit=number_at(history.settings, "kl.limit"),
        score_std=1.0 if is_scaled else None,
    )
    return [alarm for row in history.metrics for alarm in dog.observe(int(row.get("step") or 0), _numbers(row))]


def causes(history: History, alarms: Iterable[Alarm]) -> list[tuple[Cause, list[Change]]]:
    """Those that an alarm speaks for; one that a much likelier one explains is left out."""
    first: dict[str, Alarm] = {}
    for alarm in (*alarms, *said(history)):
        first.setdefault(alarm.code, alarm)
    facts = Facts(settings=history.settings, signs=first, peak=_peak(history))
    found = [(cause, one.changes(facts)) for one in SUSPECTS if (cause := _weighed(one, facts))]
    return [pair for pair in found if not any(_explains(likelier, pair[0]) for likelier, _ in found)]


def story(history: History) -> str:
    """How the reward and the KL went, in one clause."""
    rewards, kl = _values(history, "reward/mean"), _values(history, "kl/mean")
    if not rewards:
        return "no step has been logged"
    told = f"the reward went from {fmean(rewards[:5]):.3g} to {fmean(rewards[-5:]):.3g} in {len(rewards)} steps"
    return told + (f", at a KL of {fmean(kl[-5:]):.3g} nats" if kl else "")


def notes(history: History) -> list[str]:
    rewards, gold = _values(history, "reward/mean"), _values(history, "gold/mean")
    told: list[str] = []
    if rewards and len(rewards) < ENOUGH_STEPS:
        told.append(f"{len(rewards)} steps are few: some rules speak after {ENOUGH_STEPS} only")
    if len(rewards) >= ENOUGH_STEPS and fmean(rewards[-5:]) <= fmean(rewards[:5]):
        told.append("the reward has not risen")
    if not gold:
        return [*told, "no gold source: whether the reward still means anything cannot be seen (give `gold`)"]
    found = _fitted(history)
    if isinstance(found, TooLittle):
        return [*told, f"where gold peaks cannot be said yet: {found.reason}"]
    low, high = found.peak_kl_interval
    where = "past it" if found.is_past_peak else "before it"
    return [
        *told,
        f"gold is predicted to peak at {found.peak_kl:.3g} nats (95 %: {low:.3g} to {high:.3g}); "
        f"the run is at {found.kl:.3g}, {where}",
    ]


def _explains(likelier: Cause, cause: Cause) -> bool:
    return likelier.weight > 2 * cause.weight and set(likelier.evidence) >= set(cause.evidence)


def _weighed(suspect: Suspect, facts: Facts) -> Cause | None:
    weights = {code: weight for code, weight in suspect.signs.items() if code in facts.signs}
    seen = sorted((facts.signs[code] for code, weight in weights.items() if weight > 0), key=lambda alarm: alarm.step)
    hints = suspect.hints(facts)
    weight = sum(weights.values()) + sum(weight for weight, _ in hints)
    if weight <= 0 or not any(alarm.level != "info" for alarm in seen):
        return None
    return Cause(
        code=suspect.code,
        title=suspect.title,
        explanation=suspect.explanation,
        evidence=(*(f"step {alarm.step}: {alarm.message}" for alarm in seen), *(text for _, text in hints)),
        weight=weight,
        since=seen[0].step,
    )


def _settings(settings: Mapping[str, Any]) -> DetectorSettings:
    """The run's own; those of a run that is older or newer than this code may not be readable, then the defaults."""
    try:
        return DetectorSettings.model_validate(settings.get("detectors") or {})
    except ValidationError:
        return DetectorSettings()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name in READ and isinstance(value, int | float)}


def _values(history: History, name: str) -> list[float]:
    found = (row.get(name) for row in history.metrics)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _fitted(history: History) -> Fit | TooLittle:
    both = [row for row in map(_numbers, history.metrics) if "gold/mean" in row and "kl/mean" in row]
    return fit([row["kl/mean"] for row in both], [row["gold/mean"] for row in both], kind="rl")


def _peak(history: History) -> Fit | None:
    found = _fitted(history)
    return found if isinstance(found, Fit) else None
