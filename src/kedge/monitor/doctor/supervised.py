"""Diagnosis of stages that make passes over fixed data (sft, reward, preference): `train/*` and `heldout/*`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from kedge.monitor.doctor.recipes import changed, number_at, rounded, scaled, value_at
from kedge.monitor.doctor.records import Cause, Change, History

Point = tuple[int, float]

LOSS, HELD, HELD_ACCURACY = "train/loss", "heldout/loss", "heldout/accuracy"
MIN_STEPS = 20
"""Fewer steps say nothing about a trend of noisy losses."""
RISE = 1.5
"""A loss that has grown so much from its lowest has diverged; noise of a smoothed loss is a few per cent."""
OVERFIT = 1.05
"""A held-out loss that has grown so much from its best is past it."""
STILL = 0.99
"""What is left of a loss that has not been learnt from."""
COIN = 0.52
"""Held-out accuracy below which a model might as well toss one, where no interval is known."""
LEARNT = 0.6
"""Held-out accuracy above which something has been learnt: beyond the noise of 100 pairs."""

Found = tuple[Cause, list[Change]]


def causes(history: History) -> list[Found]:
    """What went wrong with any of the learners (members of an ensemble are trained one after the other)."""
    found = [one for points in learners(history) for one in (diverged(points, history), still(points, history)) if one]
    found += [one for one in (not_finite(history), overfitted(history), coin(history) or unfit(history)) if one]
    return list({cause.code: (cause, changes) for cause, changes in reversed(found)}.values())[::-1]


def diverged(points: Sequence[Point], history: History) -> Found | None:
    smooth = _smoothed(points)
    if len(points) < MIN_STEPS or not smooth:
        return None
    lowest, (_, last) = min(smooth, key=lambda point: point[1]), smooth[-1]
    if last - lowest[1] < max(0.1, (RISE - 1) * abs(lowest[1])):
        return None
    cause = Cause(
        code="train.diverged",
        title="the training loss has diverged",
        explanation="updates are too large: each one undoes more than it learns",
        evidence=(f"train/loss was {lowest[1]:.3g} around step {lowest[0]} and is {last:.3g} at the end",),
        weight=5,
        since=lowest[0],
    )
    why = "a third of a learning rate that diverges is the usual next try"
    return cause, scaled(history.settings, "optimiser.lr", 1 / 3, why, area="learning rate")


def still(points: Sequence[Point], history: History) -> Found | None:
    smooth = _smoothed(points)
    if len(points) < MIN_STEPS or not smooth or _is_better_than_a_coin(history):
        return None
    (_, first), (step, last) = smooth[0], smooth[-1]
    if not (STILL - 1) * abs(first) <= last - first < (RISE - 1) * abs(first):
        return None
    cause = Cause(
        code="train.still",
        title="nothing is learnt",
        explanation="the learning rate is too small, or what should be learnt is masked or known already",
        evidence=(f"train/loss was {first:.3g} at the start and is {last:.3g} after {step} steps",),
        weight=3,
        since=step,
    )
    why = "the loss does not move; kedge check --show-masks says whether there is anything to learn"
    return cause, scaled(history.settings, "optimiser.lr", 3, why, area="learning rate")


def overfitted(history: History) -> Found | None:
    """Held-out loss up from its best while the training loss went on falling; early stopping has dealt with it."""
    if number_at(history.settings, "look.patience") is not None or (number_at(history.settings, "members") or 1) > 1:
        return None
    looks, losses = _points(history, HELD), _smoothed(_points(history, LOSS))
    if len(looks) < 3:
        return None
    (best_step, best), (_, last) = min(looks, key=lambda point: point[1]), looks[-1]
    then = [loss for step, loss in losses if step <= best_step]
    if last < OVERFIT * best or not then or losses[-1][1] >= then[-1]:
        return None
    cause = Cause(
        code="train.overfitted",
        title="the model has overfitted",
        explanation="it learns the examples by heart: the held-out loss rises while the training loss falls",
        evidence=(f"heldout/loss was {best:.3g} at step {best_step} and is {last:.3g} at the end",),
        weight=4,
        since=best_step,
    )
    why = f"the held-out loss was best at step {best_step} of {looks[-1][0]}"
    epochs = number_at(history.settings, "epochs")
    fewer = rounded(epochs * best_step / looks[-1][0]) if epochs else None
    proposals = changed(history.settings, "epochs", fewer, why, area="learning rate") if fewer else []
    patience = changed(
        history.settings, "look.patience", 3, "stop at the best look and keep its weights", area="evaluation"
    )
    return cause, [*proposals, *patience]


def coin(history: History) -> Found | None:
    """Held-out accuracy that may as well be a half: by the interval of the reward report, else by a margin."""
    looks, told = _points(history, HELD_ACCURACY), _reported_accuracy(history)
    step = looks[-1][0] if looks else None
    if told is not None and told[1] <= 0.5:
        evidence = f"held-out accuracy is {told[0]:.1%}, and its 95 % interval begins at {told[1]:.1%}"
    elif told is None and looks and looks[-1][1] < COIN:
        evidence = f"heldout/accuracy is {looks[-1][1]:.2f} at step {step}"
    else:
        return None
    cause = Cause(
        code="train.coin",
        title="held-out preferences are guessed no better than by tossing a coin",
        explanation="labels contradict each other, chosen and rejected are swapped, or there are too few of them",
        evidence=(evidence,),
        weight=6,
        since=step,
    )
    return cause, []


def unfit(history: History) -> Found | None:
    """A reward model that its own report calls unfit, for another reason than guessing."""
    if history.reward_report.get("is_fit", True):
        return None
    cause = Cause(
        code="train.unfit",
        title="the reward report calls the model unfit",
        explanation="what is learnt from its scores would not be what the labels say",
        evidence=tuple(_findings(history)),
        weight=4,
        since=None,
    )
    return cause, []


def _findings(history: History) -> list[str]:
    """What the reward report complains of."""
    found: Sequence[Mapping[str, Any]] = history.reward_report.get("findings", ())
    return [str(one.get("message")) for one in found if one.get("level") in ("warning", "fatal")]


def _is_better_than_a_coin(history: History) -> bool:
    """What is foreseen of held-out pairs has been learnt, whatever the training loss did meanwhile."""
    told, looks = _reported_accuracy(history), _points(history, HELD_ACCURACY)
    return told[1] > 0.5 if told else bool(looks) and looks[-1][1] >= LEARNT


def _reported_accuracy(history: History) -> tuple[float, float] | None:
    """Held-out accuracy and the lower end of its 95 % interval, from the reward report."""
    value, low = (number_at(history.reward_report, f"accuracy.{name}") for name in ("value", "low"))
    return None if value is None or low is None else (value, low)


def not_finite(history: History) -> Found | None:
    steps = [event.get("step") for event in history.events if event.get("code") == "step.not_finite"]
    if not steps:
        return None
    first = min((step for step in steps if isinstance(step, int)), default=None)
    cause = Cause(
        code="train.not_finite",
        title="losses or gradients were not finite",
        explanation="an overflow: a learning rate that is far too high, or half precision where it is not enough",
        evidence=(f"{len(steps)} step(s) were dropped, the first at step {first}",),
        weight=5,
        since=first,
    )
    why = "an overflow calls for much smaller steps"
    return cause, scaled(history.settings, "optimiser.lr", 1 / 10, why, area="learning rate")


def learners(history: History) -> list[list[Point]]:
    """The training loss of each learner: one begins anew where its learning rate rises after it had fallen.

    The step of the lowest rate may be the last one of a learner or the first one of the next, so it is left out.
    """
    points = _points(history, LOSS)
    members = int(number_at(history.settings, "members") or 1)
    if members == 1:
        return [points]
    ends, starts, has_fallen = list[float](), [-math.inf], False
    for (lowest, before), (step, rate) in pairwise(_points(history, "train/lr")):
        if rate > before and has_fallen:
            ends.append(lowest)
            starts.append(step)
            has_fallen = False
        has_fallen = has_fallen or rate < before
    if len(starts) != members and history.status == "done" and points:  # a constant rate: they had equal shares
        ends = [float(points[len(points) * index // members][0]) for index in range(1, members)]
        starts = [-math.inf, *ends]
    bounds = zip(starts, [*ends, math.inf], strict=True)
    return [[point for point in points if low <= point[0] < high] for low, high in bounds]


def story(history: History) -> str:
    """How the losses went, in one clause."""
    smooth, looks = _smoothed(_points(history, LOSS)), _points(history, HELD)
    if not smooth:
        return "no step has been logged"
    told = f"train/loss went from {smooth[0][1]:.3g} to {smooth[-1][1]:.3g} in {smooth[-1][0]} steps"
    held = f", heldout/loss ended at {looks[-1][1]:.3g}" if looks else ""
    accuracy = _points(history, HELD_ACCURACY)
    return told + held + (f" with an accuracy of {accuracy[-1][1]:.1%}" if accuracy else "")


def notes(history: History) -> list[str]:
    looks = _points(history, HELD)
    told = _findings(history) if history.reward_report.get("is_fit", True) else []
    if not looks and _points(history, LOSS):
        told.append("nothing is held out: overfitting cannot be seen (give `heldout`)")
    if looks and value_at(history.settings, "look.patience") is not None:
        best = min(looks, key=lambda point: point[1])
        told.append(f"early stopping: the held-out loss was best at step {best[0]} ({best[1]:.3g})")
    return told


def _points(history: History, name: str) -> list[Point]:
    found = ((row.get("step"), row.get(name)) for row in history.metrics)
    return [
        (step, float(value))
        for step, value in found
        if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value)
    ]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over windows of a twentieth of the run (5 steps at least), each at its last step."""
    width = max(5, len(points) // 20)
    return [
        (points[end - 1][0], fmean(value for _, value in points[end - width : end]))
        for end in range(width, len(points) + 1)
    ]
