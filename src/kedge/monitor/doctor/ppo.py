"""Diagnosis of PPO: the detectors replayed over the whole history, and the causes that explain most of their alarms.

Replaying, rather than reading old alarms, judges every run by the same rules, also one that ran without detectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import ValidationError

from kedge.core.metric_table import as_table
from kedge.core.stats import ends_of
from kedge.monitor.alarms import Alarm
from kedge.monitor.detectors import CATALOGUE, DetectorSettings, Watchdog
from kedge.monitor.detectors.policy_rules import EXPLAINED, MISMATCH
from kedge.monitor.detectors.watchdog import noise_of
from kedge.monitor.doctor.diagnosis import Cause, Change, History
from kedge.monitor.doctor.ppo_causes import SUSPECTS, Suspect
from kedge.monitor.doctor.ppo_changes import Facts
from kedge.monitor.doctor.replay import replay
from kedge.monitor.doctor.settings_changes import number_at, value_at
from kedge.monitor.overoptimisation import Fit, NoFit, fit

ENOUGH_STEPS = 20
"""Steps after which every detector may raise an alarm."""

ROUNDING = 1e-4
"""Nats a token by which log-probs of a half precision always differ, and those of float32 never need to."""
_CODES = frozenset(detector.code for detector in CATALOGUE)
_MOST_LOGGED = 200
"""Alarms of a long run whose steps are looked at again: the later ones are mostly the earlier ones come back."""

EVENT_SIGNS = ("dropped.reward", "dropped.other", "failed.reward", "kl.limit")
"""Signs that no metric shows, read from the run's events: a batch dropped for a score, or for another number, that was
not finite; a run ended by a reward source that failed, or by the KL budget."""


def replay_detectors(history: History) -> list[Alarm]:
    """Every alarm of the run, by the run's own thresholds where they can be read."""
    is_normalised = value_at(history.settings, "scores.normalise") not in (None, "none")
    watchdog = Watchdog(
        CATALOGUE,
        _detector_settings(history.settings),
        kl_target=number_at(history.settings, "kl.target"),
        kl_limit=number_at(history.settings, "kl.limit"),
        score_std=1.0 if is_normalised else None,
        precision=_precision(history),
    )
    logged = [event["step"] for event in history.events if event.get("code") in _CODES and event.get("step")]
    return replay(watchdog, history.metrics, logged[:_MOST_LOGGED])


def causes(history: History, alarms: Iterable[Alarm]) -> list[tuple[Cause, list[Change]]]:
    """The causes that the alarms and events speak for, without those that a much likelier one explains."""
    first_alarms: dict[str, Alarm] = {}
    for alarm in (*alarms, *signs_in_events(history)):
        first_alarms.setdefault(alarm.code, alarm)
    facts = _facts_of(history, first_alarms)
    pairs = [(cause, suspect.changes(facts)) for suspect in SUSPECTS if (cause := _cause_of(suspect, facts))]
    return [pair for pair in pairs if not any(_explains(likelier, pair[0]) for likelier, _ in pairs)]


def _facts_of(history: History, signs: Mapping[str, Alarm]) -> Facts:
    kl, reward, explained = (_values(history, name) for name in ("kl/mean", "reward/mean", EXPLAINED))
    error = noise_of(reward) * math.sqrt(2 / 5) if len(reward) > 5 else math.inf
    return Facts(
        settings=history.settings,
        signs=signs,
        explained=fmean(explained[-10:]) if explained else None,
        lowest_kl=float(np.convolve(kl, np.full(5, 0.2), mode="valid").min()) if len(kl) >= 5 else 0.0,
        has_reward_risen=bool(reward) and fmean(reward[-5:]) - fmean(reward[:5]) > 3 * error,
        peak=_gold_peak(history),
    )


def signs_in_events(history: History) -> list[Alarm]:
    """The signs in the run's events, each as an alarm, so that causes weigh it like one."""
    alarms: list[Alarm] = []
    for event in history.events:
        code, message = event_sign(str(event.get("code")), str(event.get("message")), history.status)
        step = event.get("step")
        if code:
            step = step if isinstance(step, int) else len(history.metrics)
            alarms.append(
                Alarm(level="warning", code=code, message=message, step=step, evidence={}, cause="", advice="")
            )
    return alarms


def event_sign(code: str, message: str, status: str) -> tuple[str, str]:
    """The sign that an event stands for and its message in one line; both empty where it stands for none.

    >>> event_sign("step.not_finite", "iteration 3: dropped: reward: 1 of 8 are not finite; its batch is kept", "done")
    ('dropped.reward', 'reward: 1 of 8 are not finite')
    """
    line = " ".join(message.split())
    if code == "step.not_finite":
        reason = line.partition("dropped: ")[2].partition(";")[0]
        return ("dropped.reward" if reason.startswith("reward:") else "dropped.other"), reason
    if code == "run.failed" and status == "failed" and line.startswith("RewardError"):
        return "failed.reward", line.partition(": ")[2]
    if code == "kl.limit" and status == "stopped":
        return "kl.limit", line
    return "", ""


def story(history: History) -> str:
    """The course of the reward and the KL, in one clause."""
    rewards, kl = _values(history, "reward/mean"), _values(history, "kl/mean")
    if not rewards:
        return "no step has been logged"
    first, last = ends_of(rewards)
    clause = f"the reward went from {first:.3g} to {last:.3g} in {len(rewards)} steps"
    return clause + (f", at a KL of {ends_of(kl)[1]:.3g} nats" if kl else "")


def notes(history: History) -> list[str]:
    """What is worth knowing and no fault: too few steps, a reward that has not risen, where gold peaks."""
    rewards, gold = _values(history, "reward/mean"), _values(history, "gold/mean")
    lines: list[str] = []
    if rewards and len(rewards) < ENOUGH_STEPS:
        lines.append(f"{len(rewards)} steps are few: some rules speak after {ENOUGH_STEPS} only")
    if len(rewards) >= ENOUGH_STEPS and fmean(rewards[-5:]) <= fmean(rewards[:5]):
        lines.append("the reward has not risen")
    if not gold:
        return [*lines, "no gold source: whether the reward still means anything cannot be seen (give `gold`)"]
    curve = _fit_gold(history)
    observed = [curve.observed.in_words()] if curve.observed is not None else []
    if isinstance(curve, NoFit):
        return [*lines, *observed, f"where gold peaks is not predicted: {curve.in_words()}"]
    low, high = curve.peak_kl_interval
    where = "past it" if curve.is_past_peak else "before it"
    until = "" if curve.holds_until is None else f"; the law does not fit beyond {curve.holds_until:.3g} nats"
    if curve.collapse_kl is not None:
        until += f", and gold collapsed at {curve.collapse_kl:.3g}"
    return [
        *lines,
        *observed,
        f"gold is predicted to peak at {curve.peak_kl:.3g} nats (95 %: {low:.3g} to {high:.3g}); "
        f"the run is at {curve.kl:.3g}, {where}{until}",
    ]


def _explains(likelier: Cause, cause: Cause) -> bool:
    return likelier.weight > 2 * cause.weight and set(likelier.evidence) >= set(cause.evidence)


def _cause_of(suspect: Suspect, facts: Facts) -> Cause | None:
    """The suspect as a cause, weighed by its signs and hints; None where nothing but an info speaks for it."""
    weights = {code: weight for code, weight in suspect.signs.items() if code in facts.signs}
    alarms = sorted((facts.signs[code] for code, weight in weights.items() if weight > 0), key=lambda alarm: alarm.step)
    hints = suspect.hints(facts)
    weight = sum(weights.values()) + sum(weight for weight, _ in hints)
    if weight <= 0 or suspect.is_refuted(facts) or not any(alarm.level != "info" for alarm in alarms):
        return None
    return Cause(
        code=suspect.code,
        title=suspect.title,
        explanation=suspect.explanation,
        evidence=(*(f"step {alarm.step}: {alarm.message}" for alarm in alarms), *(text for _, text in hints)),
        weight=weight,
        since=alarms[0].step,
    )


def _detector_settings(settings: Mapping[str, Any]) -> DetectorSettings:
    """The run's own; the defaults where a run of an older or newer version has settings that cannot be read."""
    try:
        return DetectorSettings.model_validate(settings.get("detectors") or {})
    except ValidationError:
        return DetectorSettings()


def _precision(history: History) -> str:
    """The type that the run computed in: as its settings say; where they leave it open, log-probs that agree to 1e-4
    are of float32, and others may be of any type."""
    dtype = value_at(history.settings, "memory.dtype")
    if dtype not in (None, "auto"):
        return str(dtype)
    return "float32" if min(_values(history, MISMATCH), default=1.0) < ROUNDING else "bfloat16"


def _values(history: History, name: str) -> list[float]:
    """The finite values of one metric, in order."""
    return as_table(history.metrics).finite(name).tolist()


def _fit_gold(history: History) -> Fit | NoFit:
    table = as_table(history.metrics)
    rows = table.present("gold/mean") & table.present("kl/mean")
    return fit(table.values("kl/mean")[rows].tolist(), table.values("gold/mean")[rows].tolist(), kind="rl")


def _gold_peak(history: History) -> float | None:
    """The KL at which gold peaks: as predicted, else as it was seen to fall from; None where neither is known."""
    curve = _fit_gold(history)
    if isinstance(curve, Fit):
        return curve.peak_kl
    return curve.observed.kl if curve.observed is not None and curve.observed.has_fallen else None
