"""Signs that a run on rollouts gave in words: batches that it dropped, and why it ended. No metric shows them."""

from __future__ import annotations

from kedge.monitor.alarms import Alarm
from kedge.monitor.doctor.records import History

SAID = ("dropped.reward", "dropped.other", "failed.reward", "kl.limit")
"""A batch dropped for a score, or for another number, that was not finite; an end by a reward source that failed, or
by the KL budget."""


def said(history: History) -> list[Alarm]:
    """Each as an alarm, so that causes weigh it like one."""
    found: list[Alarm] = []
    for event in history.events:
        code, what = sign_of(str(event.get("code")), str(event.get("message")), history.status)
        step = event.get("step")
        if code:
            step = step if isinstance(step, int) else len(history.metrics)
            found.append(Alarm(level="warning", code=code, message=what, step=step, evidence={}, cause="", advice=""))
    return found


def sign_of(code: str, message: str, status: str) -> tuple[str, str]:
    """The sign that an event is, empty where it is none, and what it says in one line.

    >>> sign_of("step.not_finite", "iteration 3: dropped: reward: 1 of 8 are not finite; its batch is kept", "done")
    ('dropped.reward', 'reward: 1 of 8 are not finite')
    """
    line = " ".join(message.split())
    if code == "step.not_finite":
        what = line.partition("dropped: ")[2].partition(";")[0]
        return ("dropped.reward" if what.startswith("reward:") else "dropped.other"), what
    if code == "run.failed" and status == "failed" and line.startswith("RewardError"):
        return "failed.reward", line.partition(": ")[2]
    if code == "kl.limit" and status == "stopped":
        return "kl.limit", line
    return "", ""
