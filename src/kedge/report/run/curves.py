"""Which curves a stage shows, in which order and with which words. A metric without words here is shown by its name.

Left out: `time/*`, `gpu/*`, `idle/*`, rates and learning rates: costs and settings rather than curves to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.core.findings import Level
from kedge.core.metric_table import as_table
from kedge.report.charts.plot import Mark, Plot, Threshold, over_steps
from kedge.report.run.looks import detail_plots, look_plots
from kedge.report.run.members import MEMBER, MEMBER_STEP, names_of_members, side_by_side
from kedge.report.run.run_records import Record, StageRecord

_MOST_MARKS = 120
"""More would cover a chart; the list of events has them all."""
_SEVERITY: tuple[Level, ...] = ("fatal", "warning", "info", "ok")
_SETTINGS_AND_COSTS = ("time/", "gpu/", "idle/", "tokens/", "policy/lr", "value/lr", "train/lr")
_LOOKS = ("exam/", "judge/")
"""Shown by `looks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Metrics that share a chart, with their names in its legend."""

    title: str
    note: str
    names: Mapping[str, str]
    spread: str | None = None


_PPO = (
    _Curve(
        title="Reward",
        note="Mean score of an iteration's answers; the band is one standard deviation.",
        names={"reward/mean": "mean"},
        spread="reward/std",
    ),
    _Curve(
        title="KL from the reference",
        note="How far the policy has moved, in nats a sequence. It rises with every lesson; it should not run away.",
        names={"kl/mean": "KL"},
    ),
    _Curve(
        title="Length of answers",
        note="In tokens, the end-of-turn token included. Length that climbs together with the reward is the commonest "
        "way to cheat.",
        names={"length/mean": "mean"},
    ),
    _Curve(
        title="Entropy",
        note="How undecided the policy is, in nats a token. Near zero it says the same thing whatever it is asked.",
        names={"entropy/mean": "entropy"},
    ),
    _Curve(
        title="Repetition and variety",
        note="Shares: n-grams said twice in an answer, different ones over all answers, and likeness between answers.",
        names={"repetition/mean": "repetition", "distinct/mean": "distinct", "similarity/mean": "similarity"},
    ),
    _Curve(
        title="Clipped share of the update",
        note="About 0.05 to 0.3 is usual: at zero nothing is learnt, and far above the steps are too large. A mean "
        "over optimiser steps: not comparable between runs with other epochs or minibatches.",
        names={"policy/clip_fraction": "policy", "value/clip_fraction": "value"},
    ),
    _Curve(
        title="What the critic explains",
        note="Explained variance of the returns: 1 is perfect, 0 is no better than their mean, below 0 is harmful.",
        names={"value/explained_variance": "explained variance"},
    ),
    _Curve(title="Value loss", note="Squared error of the critic.", names={"value/loss": "value loss"}),
    _Curve(
        title="KL coefficient",
        note="The price of a nat; it is steered where the recipe has a target.",
        names={"kl/coef": "coefficient"},
    ),
    _Curve(
        title="Gradient norms",
        note="Before clipping. Single spikes are clipped; a climb is not.",
        names={"policy/grad_norm": "policy", "value/grad_norm": "value"},
    ),
    _Curve(
        title="Trust in the reward",
        note="Disagreement of the ensemble's members, and the share of scores outside of what reward training saw.",
        names={"reward/disagreement": "disagreement", "reward/out_of_range": "out of range"},
    ),
    _Curve(
        title="Reward and length",
        note="Correlation of score and length within an iteration; near 1 the reward pays for words.",
        names={"reward/length_correlation": "correlation"},
    ),
    _Curve(
        title="Answers cut off or without a score",
        note="Shares of an iteration's answers.",
        names={"length/truncated": "cut off", "reward/unscored": "without a score"},
    ),
    _Curve(
        title="Policy update",
        note="KL between the policy before and after an iteration's updates, as estimated on its samples. A mean over "
        "optimiser steps: not comparable between runs with other epochs or minibatches.",
        names={"policy/approx_kl": "approximate KL"},
    ),
)

_SUPERVISED_WORDS = {
    "loss": ("Loss", "On held-out data it should fall too; where it turns up, the model learns by heart."),
    "accuracy": ("Accuracy", "Share of comparisons in the right order."),
    "margin": ("Margin", "By how much the better answer scores higher, on average."),
    "grad_norm": ("Gradient norm", "Before clipping."),
}


def plots(stage: StageRecord, *, smoothing: int = 1) -> Iterator[Plot]:
    """Every curve of the stage's metrics, the main ones first; each is made when the iterator comes to it.

    `smoothing` is the number of steps that a mean is taken over.
    """
    marks = marks_of(stage.events)
    curves = [*(_PPO if _is_ppo(stage.metrics) else ()), *_supervised(stage.metrics)]
    curves += _others(stage.metrics, curves)
    metrics, members = side_by_side(stage.metrics)
    marks = () if members else marks  # events have the steps of the run, not those of a member
    for curve in curves:
        plot = over_steps(
            metrics,
            names_of_members(curve.names, members),
            title=curve.title,
            note=curve.note,
            spread=curve.spread,
            thresholds=kl_thresholds(stage.settings) if "kl/mean" in curve.names else (),
            marks=marks,
            smoothing=smoothing,
        )
        if plot:
            yield plot
        if "kl/mean" in curve.names:
            yield from look_plots(stage, marks)  # what the distance costs, beside it
    yield from detail_plots(stage)


def marks_of(events: Sequence[Record]) -> tuple[Mark, ...]:
    """Events that have a place on the x axis; of very many, the worst of each stretch of steps."""
    marks = [
        Mark(x=event["step"], level=event["level"], title=f"step {event['step']}, {event['level']}: {event['message']}")
        for event in events
        if event.get("step") is not None and event["level"] != "ok"
    ]
    if len(marks) <= _MOST_MARKS:
        return tuple(marks)
    width = (max(mark.x for mark in marks) + 1) / _MOST_MARKS
    worst_first = sorted(marks, key=lambda mark: _SEVERITY.index(mark.level))
    worst = {int(mark.x / width): mark for mark in reversed(worst_first)}
    return tuple(worst[stretch] for stretch in sorted(worst))


def kl_thresholds(settings: Mapping[str, Any]) -> tuple[Threshold, ...]:
    """Target and limit of the recipe, where it has them."""
    kl = settings.get("kl")
    given = cast(Mapping[str, Any], kl) if isinstance(kl, Mapping) else {}
    target, limit = given.get("target"), given.get("limit")
    thresholds = (
        Threshold(value=target, name="target", kind="target") if target is not None else None,
        Threshold(value=limit, name="limit", kind="limit") if limit is not None else None,
    )
    return tuple(threshold for threshold in thresholds if threshold)


def _is_ppo(records: Sequence[Record]) -> bool:
    return any("reward/mean" in record or "kl/mean" in record for record in records[:3])


def _supervised(records: Sequence[Record]) -> Iterator[_Curve]:
    """Training and held-out values of the same quantity share a chart."""
    names = as_table(records).names
    quantities = dict.fromkeys(name.split("/", 1)[1] for name in names if name.startswith(("train/", "heldout/")))
    for name in sorted(quantities, key=lambda name: (name not in _SUPERVISED_WORDS, list(quantities).index(name))):
        if f"train/{name}".startswith(_SETTINGS_AND_COSTS) or f"train/{name}" in (MEMBER, MEMBER_STEP):
            continue
        title, note = _SUPERVISED_WORDS.get(name, (name.replace("_", " ").capitalize(), ""))
        yield _Curve(title=title, note=note, names={f"train/{name}": "training", f"heldout/{name}": "held out"})


_SHOWN_ELSEWHERE = ("step", "at", MEMBER, MEMBER_STEP, "reward/std", "gold/mean")


def _others(records: Sequence[Record], shown: Sequence[_Curve]) -> Iterator[_Curve]:
    """A chart for each metric that is in no other."""
    covered = {name for curve in shown for name in curve.names}
    for name in as_table(records).names:
        if (
            name not in covered
            and name not in _SHOWN_ELSEWHERE
            and not name.startswith((*_SETTINGS_AND_COSTS, *_LOOKS))
        ):
            yield _Curve(title=name, note="", names={name: name})
