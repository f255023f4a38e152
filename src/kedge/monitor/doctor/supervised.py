"""Diagnosis of stages that make passes over fixed data (sft, reward, preference): `train/*` and `heldout/*`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kedge.core.metric_table import as_table
from kedge.core.stats import ends_of
from kedge.monitor.detectors.watchdog import noise_of
from kedge.monitor.doctor.diagnosis import Cause, Change, History
from kedge.monitor.doctor.settings_changes import changed, number_at, rounded, scaled, value_at

Point = tuple[int, float]

TRAIN_LOSS, HELDOUT_LOSS, HELDOUT_ACCURACY = "train/loss", "heldout/loss", "heldout/accuracy"
MIN_STEPS = 20
"""Fewer steps say nothing about a trend of noisy losses."""
DIVERGED = 1.5
"""A smoothed loss this many times its lowest has diverged, where noise does not explain it."""
NOISE_ERRORS = 7.0
"""Standard errors between two means of a noisy loss that are no chance: the lowest is the lowest of many, and losses of
small batches have heavy tails."""
OVERFITTED = 1.05
"""A held-out loss this many times its best means overfitting."""
UNMOVED = 0.99
"""A loss that is still above this share of its start has not moved."""
CHANCE = 0.52
"""Held-out accuracy below which a model may be guessing, where no interval is known."""
LEARNT = 0.6
"""Held-out accuracy above which something has been learnt: a half plus the noise of 100 pairs."""

CauseAndChanges = tuple[Cause, list[Change]]


def causes(history: History) -> list[CauseAndChanges]:
    """The causes that any of the learners shows, each once (members of an ensemble are trained one after the other)."""
    checks = [check(points, history) for points in learners(history) for check in (diverged, unmoved)]
    checks += [
        reward_source(history),
        not_finite(history),
        overfitted(history),
        no_better_than_chance(history) or unfit(history),
    ]
    pairs = [pair for pair in checks if pair is not None]
    return list({cause.code: (cause, changes) for cause, changes in reversed(pairs)}.values())[::-1]


def diverged(points: Sequence[Point], history: History) -> CauseAndChanges | None:
    smooth = _smoothed(points)
    if len(points) < MIN_STEPS or not smooth:
        return None
    lowest, (_, last) = min(smooth, key=lambda point: point[1]), smooth[-1]
    noise = noise_of([loss for _, loss in points]) * math.sqrt(2 / _width(points))
    if last - lowest[1] < max(0.1, (DIVERGED - 1) * abs(lowest[1]), NOISE_ERRORS * noise):
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


def unmoved(points: Sequence[Point], history: History) -> CauseAndChanges | None:
    smooth = _smoothed(points)
    if len(points) < MIN_STEPS or not smooth or _is_better_than_chance(history):
        return None
    (_, first), (step, last) = smooth[0], smooth[-1]
    if not (UNMOVED - 1) * abs(first) <= last - first < (DIVERGED - 1) * abs(first):
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


def overfitted(history: History) -> CauseAndChanges | None:
    """Held-out loss up from its best while the training loss went on falling. None with early stopping, which keeps
    the best weights, and for ensembles, whose held-out losses are those of several learners."""
    if number_at(history.settings, "eval.patience") is not None or (number_at(history.settings, "members") or 1) > 1:
        return None
    evaluations, losses = _points(history, HELDOUT_LOSS), _smoothed(_points(history, TRAIN_LOSS))
    if len(evaluations) < 3:
        return None
    (best_step, best), (_, last) = min(evaluations, key=lambda point: point[1]), evaluations[-1]
    until_best = [loss for step, loss in losses if step <= best_step]
    if last < OVERFITTED * best or not until_best or losses[-1][1] >= until_best[-1]:
        return None
    cause = Cause(
        code="train.overfitted",
        title="the model has overfitted",
        explanation="it learns the examples by heart: the held-out loss rises while the training loss falls",
        evidence=(f"heldout/loss was {best:.3g} at step {best_step} and is {last:.3g} at the end",),
        weight=4,
        since=best_step,
    )
    why = f"the held-out loss was best at step {best_step} of {evaluations[-1][0]}"
    epochs = number_at(history.settings, "epochs")
    fewer = rounded(epochs * best_step / evaluations[-1][0]) if epochs else None
    proposals = changed(history.settings, "epochs", fewer, why, area="learning rate") if fewer else []
    patience = changed(
        history.settings, "eval.patience", 3, "stop at the best evaluation and keep its weights", area="evaluation"
    )
    return cause, [*proposals, *patience]


def no_better_than_chance(history: History) -> CauseAndChanges | None:
    """Held-out accuracy that may be a half: by its interval in the reward report, else by the threshold `CHANCE`."""
    evaluations, reported = _points(history, HELDOUT_ACCURACY), _reported_accuracy(history)
    step = evaluations[-1][0] if evaluations else None
    if reported is not None and reported[1] <= 0.5:
        evidence = f"held-out accuracy is {reported[0]:.1%}, and its 95 % interval begins at {reported[1]:.1%}"
    elif reported is None and evaluations and evaluations[-1][1] < CHANCE:
        evidence = f"heldout/accuracy is {evaluations[-1][1]:.2f} at step {step}"
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


def unfit(history: History) -> CauseAndChanges | None:
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
    """The warnings and fatal findings of the reward report."""
    findings: Sequence[Mapping[str, Any]] = history.reward_report.get("findings", ())
    return [str(finding.get("message")) for finding in findings if finding.get("level") in ("warning", "fatal")]


def _is_better_than_chance(history: History) -> bool:
    """Whether held-out pairs are predicted: then something was learnt, whatever the training loss did."""
    reported, evaluations = _reported_accuracy(history), _points(history, HELDOUT_ACCURACY)
    return reported[1] > 0.5 if reported else bool(evaluations) and evaluations[-1][1] >= LEARNT


def _reported_accuracy(history: History) -> tuple[float, float] | None:
    """Held-out accuracy and the lower end of its 95 % interval, from the reward report."""
    value, low = (number_at(history.reward_report, f"accuracy.{name}") for name in ("value", "low"))
    return None if value is None or low is None else (value, low)


def reward_source(history: History) -> CauseAndChanges | None:
    """A run that samples and was ended by its reward source."""
    if history.status != "failed":
        return None
    endings = [str(event.get("message")) for event in history.events if event.get("code") == "run.failed"]
    error, _, reason = (endings or [""])[-1].partition(": ")
    if error != "RewardError":
        return None
    cause = Cause(
        code="reward_source",
        title="the reward source failed",
        explanation="answers without a score teach nothing",
        evidence=(" ".join(reason.split()),),
        weight=8,
        since=None,
    )
    return cause, []


def not_finite(history: History) -> CauseAndChanges | None:
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
    """The training loss of each member of an ensemble: one begins where the learning rate rises after it had fallen.

    The step of the lowest rate may be the last one of a member or the first one of the next, so it is left out.
    """
    points = _points(history, TRAIN_LOSS)
    members = int(number_at(history.settings, "members") or 1)
    if members == 1:
        return [points]
    member_at = dict(_points(history, "train/member"))
    if member_at:
        numbers = sorted(set(member_at.values()))
        return [[point for point in points if member_at.get(point[0]) == number] for number in numbers]
    ends, starts, has_fallen = list[float](), [-math.inf], False
    for (lowest, before), (step, rate) in pairwise(_points(history, "train/lr")):
        if rate > before and has_fallen:
            ends.append(lowest)
            starts.append(step)
            has_fallen = False
        has_fallen = has_fallen or rate < before
    if len(starts) != members and history.status == "done" and points:  # a constant rate: equal shares of the steps
        ends = [float(points[len(points) * index // members][0]) for index in range(1, members)]
        starts = [-math.inf, *ends]
    bounds = zip(starts, [*ends, math.inf], strict=True)
    return [[point for point in points if low <= point[0] < high] for low, high in bounds]


def story(history: History) -> str:
    """The course of the losses, in one clause."""
    losses, evaluations = _points(history, TRAIN_LOSS), _points(history, HELDOUT_LOSS)
    if not losses:
        return "no step has been logged"
    first, last = ends_of([loss for _, loss in losses])
    training = f"train/loss went from {first:.3g} to {last:.3g} in {losses[-1][0]} steps"
    heldout = f", heldout/loss ended at {evaluations[-1][1]:.3g}" if evaluations else ""
    accuracy = _points(history, HELDOUT_ACCURACY)
    return training + heldout + (f" with an accuracy of {accuracy[-1][1]:.1%}" if accuracy else "")


def notes(history: History) -> list[str]:
    """What is worth knowing and no fault: findings of a fit reward model, no held-out data, early stopping, a held-out
    loss that is no lower than before training."""
    evaluations = _points(history, HELDOUT_LOSS)
    lines = _findings(history) if history.reward_report.get("is_fit", True) else []
    if not evaluations and _points(history, TRAIN_LOSS):
        lines.append("nothing is held out: overfitting cannot be seen (give `heldout`)")
    if evaluations and value_at(history.settings, "eval.patience") is not None:
        best = min(evaluations, key=lambda point: point[1])
        lines.append(f"early stopping: the held-out loss was best at step {best[0]} ({best[1]:.3g})")
    elif len(evaluations) > 1 and evaluations[0][0] == 0 and evaluations[-1][1] >= evaluations[0][1]:
        before, after = (f"{evaluations[place][1]:.3g}" for place in (0, -1))
        lines.append(
            f"heldout/loss is {after} and was {before} before training: steps may be too large (a third of "
            "optimiser.lr is the usual next try), or too many"
        )
    return lines


def _points(history: History, name: str) -> list[Point]:
    """The finite values of one metric, with their steps."""
    table = as_table(history.metrics)
    steps, values = table.values("step"), table.values(name)
    usable = np.isfinite(steps) & np.isfinite(values)
    return list(zip(steps[usable].astype(int).tolist(), values[usable].tolist(), strict=True))


def _width(points: Sequence[Point]) -> int:
    return max(5, len(points) // 20)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Means over windows of a twentieth of the run (5 steps at least), each at its last step."""
    width = _width(points)
    if len(points) < width:
        return []
    values = np.array([value for _, value in points])
    centre = values.mean()  # sums of what is left are small, so their differences keep their digits
    sums = np.cumsum(np.concatenate([[0.0], values - centre]))
    means = centre + (sums[width:] - sums[:-width]) / width
    return list(zip((step for step, _ in points[width - 1 :]), means.tolist(), strict=True))
