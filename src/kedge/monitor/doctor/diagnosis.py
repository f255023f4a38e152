"""From a stage's history to a diagnosis, as an experienced colleague would give it. Pure: no file is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.core.findings import Level
from kedge.monitor.alarms import Alarm
from kedge.monitor.doctor import ppo, supervised
from kedge.monitor.doctor.recipes import in_tuning_order
from kedge.monitor.doctor.records import Cause, Diagnosis, History, Moment

SHARE = 0.6
"""A cause is worth a change of the recipe when it weighs at least this much of the likeliest one."""

_ENDINGS: dict[str, tuple[Level, str]] = {
    "failed": ("fatal", "the run failed"),
    "stopped": ("warning", "the run was stopped by a contract of its recipe"),
    "interrupted": ("info", "the run was interrupted; --resume goes on with it"),
    "running": ("info", "the run is still going on"),
}
_ENDED = ("run.failed", "run.stopped")
"""What an attempt said when it ended; a later one may have gone on."""
_KEPT_INFO = ("run.resumed",)
"""Events that are part of the story although nothing was wrong."""


def diagnose(history: History) -> Diagnosis:
    """Healthy or not, what happened when, why most likely, and what to change."""
    is_ppo = any("kl/mean" in row for row in history.metrics)
    alarms = ppo.replayed(history) if is_ppo else []
    found = ppo.causes(history, alarms) if is_ppo else supervised.causes(history)
    found.sort(key=lambda pair: -pair[0].weight)
    causes = [cause for cause, _ in found]
    reason = _reason(history)
    worth = [change for cause, changes in found if cause.weight >= SHARE * causes[0].weight for change in changes]
    story = ppo.story(history) if is_ppo else supervised.story(history)
    return Diagnosis(
        is_healthy=not causes and reason is None,
        verdict=_verdict(history, causes, reason, story),
        timeline=_timeline(history, alarms, () if is_ppo else causes),
        causes=tuple(causes),
        changes=in_tuning_order(worth),
        notes=tuple(ppo.notes(history) if is_ppo else supervised.notes(history)),
    )


def _verdict(history: History, causes: Sequence[Cause], reason: str | None, story: str) -> str:
    if causes:
        first = causes[0]
        since = f", since step {first.since}" if first.since is not None else ""
        return f"Not healthy: {first.title}{since}; {story}."
    if reason is not None:
        return f"Not healthy: {reason}; {story}."
    if not history.metrics:
        return "Nothing to judge: no step has been logged."
    return f"Healthy: {story}."


def _reason(history: History) -> str | None:
    """What the run itself called fatal; None where it said nothing of the kind, or was taken up again since."""
    has_ended_badly = history.status in ("failed", "stopped")
    told = [
        _one_line(event.get("message"))
        for event in history.events
        if event.get("level") == "fatal" and (has_ended_badly or event.get("code") not in _ENDED)
    ]
    if not has_ended_badly:
        return told[-1] if told else None
    ending = _ENDINGS[history.status][1]
    return f"{ending} ({told[-1]})" if told else ending


def _timeline(history: History, alarms: Sequence[Alarm], causes: Sequence[Cause]) -> tuple[Moment, ...]:
    """Alarms, causes without one, and events in order; an alarm that the run raised itself is told once."""
    known = {(alarm.code, alarm.step) for alarm in alarms}
    moments = [Moment(step=alarm.step, level=alarm.level, what=alarm.message) for alarm in alarms]
    for event in history.events:
        is_worth = event.get("level") in ("warning", "fatal") or event.get("code") in _KEPT_INFO
        if is_worth and (event.get("code"), event.get("step")) not in known:
            moments.append(Moment(step=_step(event), level=event["level"], what=_one_line(event.get("message"))))
    moments += [Moment(step=cause.since, level="warning", what=cause.title) for cause in causes]
    moments.sort(key=lambda moment: (moment.step is None, moment.step or 0))
    last = max((step for row in history.metrics if (step := _step(row)) is not None), default=None)
    level, what = _ENDINGS.get(history.status, ("info", "the run is done"))
    return (*moments, Moment(step=last, level=level, what=what))


def _step(record: Any) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) else None


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
