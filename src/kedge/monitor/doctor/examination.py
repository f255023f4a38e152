"""From a stage's history to its diagnosis, as an experienced colleague would give it. Pure: no file is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kedge.core.findings import Level
from kedge.core.metric_table import as_table
from kedge.monitor.alarms import Alarm
from kedge.monitor.doctor import ppo, speed, supervised
from kedge.monitor.doctor.diagnosis import Cause, Diagnosis, History, Moment
from kedge.monitor.doctor.settings_changes import in_tuning_order

SHARE = 0.6
"""A cause is worth a change of the recipe when it weighs at least this much of the likeliest one."""

SURE = 3.0
"""A cause that weighs less has only signs that many failures have: the diagnosis then says that it does not know."""
RIVAL = 0.9
"""Of two causes whose weights are this near, the diagnosis names both."""

_ENDINGS: dict[str, tuple[Level, str]] = {
    "failed": ("fatal", "the run failed"),
    "stopped": ("warning", "the run was stopped by a contract of its recipe"),
    "waiting": ("info", "the run waits for people; --resume goes on when they are done"),
    "interrupted": ("info", "the run was interrupted; --resume goes on with it"),
    "running": ("info", "the run is still going on"),
}
_RL_KINDS = ("ppo", "group")
"""Stages of these kinds are judged as RL also where no step was logged, as after a reward source that is off."""
_END_CODES = ("run.failed", "run.stopped")
"""Events with which an attempt ends; a later attempt may have resumed the run."""
_INFO_CODES = ("run.resumed",)
"""Events of level info that belong on the timeline all the same."""


def diagnose(history: History) -> Diagnosis:
    """Healthy or not, what happened when, why most likely, and what to change."""
    is_rl = history.kind in _RL_KINDS or "kl/mean" in as_table(history.metrics).names
    alarms = ppo.replay_detectors(history) if is_rl else []
    ranked = ppo.causes(history, alarms) if is_rl else supervised.causes(history)
    ranked.sort(key=lambda pair: -pair[0].weight)
    causes = [cause for cause, _ in ranked]
    reason = _fatal_reason(history)
    proposals = [change for cause, changes in ranked if cause.weight >= SHARE * causes[0].weight for change in changes]
    story = ppo.story(history) if is_rl else supervised.story(history)
    return Diagnosis(
        is_healthy=not causes and reason is None,
        verdict=_verdict(history, causes, reason, story),
        timeline=_timeline(history, alarms, () if is_rl else causes),
        causes=tuple(causes),
        changes=in_tuning_order(proposals),
        notes=(*(ppo.notes(history) if is_rl else supervised.notes(history)), *speed.notes(history)),
    )


def _verdict(history: History, causes: Sequence[Cause], reason: str | None, story: str) -> str:
    if causes:
        first, rivals = causes[0], rivals_of(causes)
        since = f", since step {first.since}" if first.since is not None else ""
        if first.weight < SURE:
            return f"Not healthy, but why is not known; at best {first.title}{since}, for which little speaks; {story}."
        if rivals:
            others = ", or ".join(cause.title for cause in rivals)
            return f"Not healthy: {first.title}{since}, or as likely {others}: the run does not tell which; {story}."
        return f"Not healthy: {first.title}{since}; {story}."
    if reason is not None:
        return f"Not healthy: {reason}; {story}."
    if not history.metrics:
        return "Nothing to judge: no step has been logged."
    return " ".join(filter(None, (f"Healthy: {story}.", speed.notice(history))))


def rivals_of(causes: Sequence[Cause]) -> list[Cause]:
    """The causes for which about as much speaks as for the first."""
    return [cause for cause in causes[1:] if cause.weight >= RIVAL * causes[0].weight]


def _fatal_reason(history: History) -> str | None:
    """The last fatal event of the run; None where there is none, or where the run was resumed after it."""
    has_ended_badly = history.status in ("failed", "stopped")
    messages = [
        _one_line(event.get("message"))
        for event in history.events
        if event.get("level") == "fatal" and (has_ended_badly or event.get("code") not in _END_CODES)
    ]
    if not has_ended_badly:
        return messages[-1] if messages else None
    ending = _ENDINGS[history.status][1]
    return f"{ending} ({messages[-1]})" if messages else ending


def _timeline(history: History, alarms: Sequence[Alarm], causes: Sequence[Cause]) -> tuple[Moment, ...]:
    """Alarms, causes and events in the order of their steps; an alarm that the run logged as an event stands once."""
    alarmed = {(alarm.code, alarm.step) for alarm in alarms}
    moments = [Moment(step=alarm.step, level=alarm.level, what=alarm.message) for alarm in alarms]
    for event in history.events:
        is_notable = event.get("level") in ("warning", "fatal") or event.get("code") in _INFO_CODES
        if is_notable and (event.get("code"), event.get("step")) not in alarmed:
            moments.append(Moment(step=_step(event), level=event["level"], what=_one_line(event.get("message"))))
    moments += [Moment(step=cause.since, level="warning", what=cause.title) for cause in causes]
    moments.sort(key=lambda moment: (moment.step is None, moment.step or 0))
    steps = as_table(history.metrics).finite("step")
    last = int(steps.max()) if len(steps) else None
    level, what = _ENDINGS.get(history.status, ("info", "the run is done"))
    return (*moments, Moment(step=last, level=level, what=what))


def _step(record: Any) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) else None


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
