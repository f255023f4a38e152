"""The headline metrics of a running stage, its progress, and how long it will still take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from kedge.core.metric_table import as_table
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.words import duration, short

HEADLINE_NAMES = {
    "reward/mean": "reward",
    "gold/mean": "gold",
    "kl/mean": "KL",
    "length/mean": "length",
    "entropy/mean": "entropy",
    "policy/clip_fraction": "clip fraction",
    "train/loss": "loss",
    "heldout/loss": "held-out loss",
    "train/accuracy": "accuracy",
    "heldout/accuracy": "held-out accuracy",
}
_RECENT_STEPS = 20
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineMetric:
    name: str
    values: tuple[float, ...]

    @property
    def latest(self) -> str:
        return short(self.values[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`total` and `seconds_left` are None where the recipe does not say how many steps there will be."""

    step: int
    total: int | None
    seconds_a_step: float | None
    seconds_left: float | None
    tokens_a_second: float | None

    def in_words(self) -> str:
        """
        >>> Progress(step=20, total=50, seconds_a_step=1.5, seconds_left=45.0, tokens_a_second=900.0).in_words()
        'step 20 of 50 · 1.5 s a step · 900 tokens/s · 45 s left'
        """
        parts = [f"step {self.step:,}" + (f" of {self.total:,}" if self.total else "")]
        if self.seconds_a_step is not None:
            parts.append(f"{duration(self.seconds_a_step)} a step")
        if self.tokens_a_second is not None:
            parts.append(f"{self.tokens_a_second:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return " · ".join(parts)


def headline_metrics(stage: StageRecord) -> list[HeadlineMetric]:
    """Those of the headline metrics that this stage logs."""
    table = as_table(stage.metrics)
    return [
        HeadlineMetric(name=label, values=tuple(table.column(name)[1].tolist()))
        for name, label in HEADLINE_NAMES.items()
        if name in table.names
    ]


def progress(stage: StageRecord) -> Progress | None:
    """Steps done, speed and time left, from the clock of the last steps; None before the first one."""
    if not stage.metrics:
        return None
    step = int(stage.metrics[-1]["step"])
    total: int | None = stage.settings.get("iterations")
    pace = _pace(stage.metrics[-_RECENT_STEPS:])
    return Progress(
        step=step,
        total=total,
        seconds_a_step=pace,
        seconds_left=None if total is None or pace is None or stage.status != "running" else (total - step) * pace,
        tokens_a_second=stage.metrics[-1].get("tokens/per_second"),
    )


def current_stage(run: RunRecord, name: str = "") -> StageRecord | None:
    """The stage to show: the one of that name, else the one that is running, else the last that has metrics."""
    named = [stage for stage in run.stages if stage.name == name]
    running = [stage for stage in run.stages if stage.status == "running"]
    trained = [stage for stage in run.stages if stage.metrics]
    return (named or running or trained or list(run.stages) or [None])[-1]


def sparkline(values: Sequence[float], width: int) -> str:
    """One letter a stretch, by its mean between the lowest and the highest; × where a value is not finite.

    >>> sparkline([0.0, 1.0, 2.0, 3.0], 4), sparkline([1.0, 1.0, 5.0, 5.0, float("nan"), 2.0], 3)
    ('▁▃▆█', '▁█×')
    """
    size = min(width, len(values))
    stretches = [values[at * len(values) // size : (at + 1) * len(values) // size] for at in range(size)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    finite = [mean for mean in means if isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] if isfinite(mean) else "×" for mean in means)


def _pace(records: Sequence[Record]) -> float | None:
    if len(records) < 2 or records[-1]["step"] <= records[0]["step"]:
        return None
    pace = (records[-1]["at"] - records[0]["at"]) / (records[-1]["step"] - records[0]["step"])
    return pace if pace > 0 else None  # a clock may have been set back
