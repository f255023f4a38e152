"""A run and its stages summarised in sentences: how each ended, and how far its main numbers moved.

`methods` says what was run, `kedge.monitor.doctor` whether it was healthy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.core.metric_table import as_table
from kedge.core.stats import ends_of
from kedge.report.run.methods import what_was_run
from kedge.report.run.run_records import Record, RunRecord, StageRecord
from kedge.report.words import listed, number, percent, short
from kedge.runs.manifest import Status

STATUS_WORDS: Mapping[Status, str] = {
    "running": "is still running",
    "done": "is done",
    "failed": "failed",
    "stopped": "was stopped by a contract of its recipe, with everything saved",
    "waiting": "waits for people; `kedge run RECIPE --resume` goes on when they are done",
    "interrupted": "was interrupted; `kedge run RECIPE --resume` goes on with it",
}


def what_happened(stage: StageRecord) -> Iterator[str]:
    """How it ended, then how its main numbers moved."""
    steps = f" after {stage.last_step:,} steps" if stage.last_step else ""
    yield f"It {STATUS_WORDS[stage.status]}{steps}."
    if moves := _moves(stage.metrics):
        yield f"From its first steps to its last, {listed(moves)}."


def headline(run: RunRecord) -> str:
    """The sentence under the title of the page."""
    if not run.is_pipeline:
        return what_was_run(run.stages[0].kind, run.stages[0].settings)
    names = [stage.name for stage in run.stages]
    count = len(names) + len(run.unstarted)
    pipeline = f"A pipeline of {count} stage{'' if count == 1 else 's'} on `{run.manifest.settings.get('model', '?')}`"
    if not names:
        return f"{pipeline}; none has begun."
    rest = f"; not begun: {', '.join(run.unstarted)}" if run.unstarted else ""
    return f"{pipeline}: {', '.join(names)}{rest}."


def outcomes(run: RunRecord) -> Iterator[str]:
    """The results of a pipeline, a sentence for each stage that has some; none for a stage on its own."""
    if not run.is_pipeline:
        return
    for stage in run.stages:
        if stage.evaluation is not None:
            yield from _wins(stage.evaluation)
        elif stage.reward_report is not None:
            accuracy = _share(stage.reward_report["accuracy"], "value")
            yield f"The reward model of `{stage.name}` is right on {accuracy} of held-out pairs."
        elif moves := _moves(stage.metrics):
            yield f"In `{stage.name}`, {listed(moves[:3])}."


def _wins(evaluation: Record) -> Iterator[str]:
    for model, sources in evaluation["comparisons"].items():
        for source, comparison in sources.items():
            win_rate = comparison["win_rate"]
            yield (
                f"Judged by {source}, `{model}` wins over `{evaluation['baseline']}` on {_share(win_rate, 'rate')} of "
                f"{win_rate['prompts']:,} prompts."
            )


def _share(share: Mapping[str, Any], middle: str) -> str:
    """
    >>> _share({"rate": 0.86, "low": 0.75, "high": 0.94}, "rate")
    '86.0 % (95 % interval 75.0 to 94.0)'
    """
    low, high = (number(100 * share[key], 1) for key in ("low", "high"))
    return f"{percent(share[middle])} (95 % interval {low} to {high})"


def ends(metrics: Sequence[Record], name: str) -> tuple[float, float] | None:
    """Mean of a metric over the first steps and over the last; None where there are not two to compare.

    >>> ends([{"a": 1.0}, {"a": 2.0}, {"b": 5.0}, {"a": 4.0}], "a")
    (1.0, 4.0)
    """
    values = as_table(metrics).finite(name).tolist()
    return ends_of(values) if len(values) >= 2 else None


_MOVES = {
    "train/loss": ("the training loss", ""),
    "heldout/loss": ("the held-out loss", ""),
    "heldout/accuracy": ("held-out accuracy", ""),
    "reward/mean": ("the mean reward", ""),
    "gold/mean": ("the gold score", ""),
    "kl/mean": ("the KL from the reference", "nats"),
    "length/mean": ("the length of answers", "tokens"),
    "entropy/mean": ("entropy", "nats"),
}


def _moves(metrics: Sequence[Record]) -> list[str]:
    moves = (_move(metrics, name, noun, unit) for name, (noun, unit) in _MOVES.items())
    return [move for move in moves if move]


def _move(metrics: Sequence[Record], name: str, noun: str, unit: str) -> str:
    """
    >>> _move([{"kl/mean": 0.5}, {"kl/mean": 6.0}], "kl/mean", "the KL", "nats")
    'the KL rose from 0.5 to 6 nats'
    """
    both = ends(metrics, name)
    if both is None:
        return ""
    first, last = (short(round(value, 4)) for value in both)
    if first == last:
        return f"{noun} stayed at {first} {unit}".rstrip()
    return f"{noun} {'rose' if both[1] > both[0] else 'fell'} from {first} to {last} {unit}".rstrip()
