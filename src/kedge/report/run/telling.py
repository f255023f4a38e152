"""The story of a stage in words: what was run, what became of it, and how far its main numbers moved.

Whether it was healthy is the doctor's to say (`kedge.monitor.doctor`); this file only words what is written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from kedge.report.run.records import Record, RunRecord, StageRecord
from kedge.report.words import number, short
from kedge.runs.manifest import Status

STATUS_WORDS: Mapping[Status, str] = {
    "running": "is still running",
    "done": "is done",
    "failed": "failed",
    "stopped": "was stopped by a contract of its recipe, with everything saved",
    "interrupted": "was interrupted; `kedge run RECIPE --resume` goes on with it",
}

_ENDS_SHARE, _MOST_AT_ENDS = 0.1, 10
"""Both ends of a run are means over this share of its steps, at most so many: single steps are noisy."""


def what_was_run(kind: str, settings: Mapping[str, Any]) -> str:
    """One sentence from the settings of a stage."""
    tellers = {"sft": _sft, "reward": _reward, "ppo": _ppo, "data": _data, "evaluate": _evaluate}
    if kind in tellers:
        return tellers[kind](settings)
    start = f" starting from {_named(settings['from'])}" if settings.get("from") else ""
    return f"A stage of kind `{kind}`{start}."


def what_happened(stage: StageRecord) -> Iterator[str]:
    """How it ended, then how its main numbers moved."""
    steps = f" after {stage.last_step:,} steps" if stage.last_step else ""
    yield f"It {STATUS_WORDS[stage.status]}{steps}."
    if moves := _moves(stage.metrics):
        yield f"From its first steps to its last, {_listed(moves)}."


def headline(run: RunRecord) -> str:
    """What the page says under its title."""
    if not run.is_pipeline:
        return what_was_run(run.stages[0].kind, run.stages[0].settings)
    names = [stage.name for stage in run.stages]
    count = len(names) + len(run.unstarted)
    told = f"A pipeline of {count} stage{'' if count == 1 else 's'} on `{run.manifest.settings.get('model', '?')}`"
    if not names:
        return f"{told}; none has begun."
    rest = f"; not begun: {', '.join(run.unstarted)}" if run.unstarted else ""
    return f"{told}: {', '.join(names)}{rest}."


def outcomes(run: RunRecord) -> Iterator[str]:
    """What a pipeline achieved, a sentence for each stage that has something to show. A stage alone tells its own."""
    if not run.is_pipeline:
        return
    for stage in run.stages:
        if stage.evaluation is not None:
            yield from _wins(stage.evaluation)
        elif stage.reward_report is not None:
            told = _share(stage.reward_report["accuracy"], "value")
            yield f"The reward model of `{stage.name}` is right on {told} of held-out pairs."
        elif moves := _moves(stage.metrics):
            yield f"In `{stage.name}`, {_listed(moves[:3])}."


def _wins(evaluation: Record) -> Iterator[str]:
    for model, sources in evaluation["comparisons"].items():
        for source, found in sources.items():
            told = _share(found["win_rate"], "rate")
            yield (
                f"Judged by {source}, `{model}` wins over `{evaluation['baseline']}` on {told} of "
                f"{found['win_rate']['prompts']:,} prompts."
            )


def _share(found: Mapping[str, Any], middle: str) -> str:
    """
    >>> _share({"rate": 0.86, "low": 0.75, "high": 0.94}, "rate")
    '86.0 % (95 % interval 75.0 to 94.0)'
    """
    value, low, high = (number(100 * found[key], 1) for key in (middle, "low", "high"))
    return f"{value} % (95 % interval {low} to {high})"


def ends(metrics: Sequence[Record], name: str) -> tuple[float, float] | None:
    """Mean of a metric over the first steps and over the last; None where there are not two to compare.

    >>> ends([{"a": 1.0}, {"a": 2.0}, {"b": 5.0}, {"a": 4.0}], "a")
    (1.0, 4.0)
    """
    values = [value for record in metrics if (value := record.get(name)) is not None and isfinite(value)]
    if len(values) < 2:
        return None
    size = min(_MOST_AT_ENDS, max(1, round(_ENDS_SHARE * len(values))))
    return fmean(values[:size]), fmean(values[-size:])


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
    return [told for name, (noun, unit) in _MOVES.items() if (told := _move(metrics, name, noun, unit))]


def _move(metrics: Sequence[Record], name: str, noun: str, unit: str) -> str:
    """
    >>> _move([{"kl/mean": 0.5}, {"kl/mean": 6.0}], "kl/mean", "the KL", "nats")
    'the KL rose from 0.5 to 6 nats'
    """
    found = ends(metrics, name)
    if found is None:
        return ""
    first, last = (short(round(value, 4)) for value in found)
    if first == last:
        return f"{noun} stayed at {first} {unit}".rstrip()
    return f"{noun} {'rose' if found[1] > found[0] else 'fell'} from {first} to {last} {unit}".rstrip()


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["a", "b", "c"]), _listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _named(value: Any) -> str:
    """
    >>> _named(["a.jsonl", "b.jsonl"]), _named(None), _named({"kind": "regex"})
    ('`a.jsonl` and `b.jsonl`', "the recipe's model", 'a reward of kind `regex`')
    """
    if value is None:
        return "the recipe's model"
    if isinstance(value, Mapping):
        return f"a reward of kind `{value.get('kind', '?')}`"
    if isinstance(value, (list, tuple)):
        return _listed([f"`{one}`" for one in value]) if value else "nothing"
    return f"`{value}`"


def _sft(of: Mapping[str, Any]) -> str:
    return (
        f"Supervised fine-tuning: {_named(of.get('from'))} imitates the conversations of {_named(of.get('data'))}, "
        f"{_passes(of)}, {of.get('batch')} conversations a step."
    )


def _reward(of: Mapping[str, Any]) -> str:
    members = of.get("members", 1)
    what = "A reward model" if members == 1 else f"An ensemble of {members} reward models"
    return f"{what}: {_named(of.get('from'))} learns to score answers from {_named(of.get('data'))}, {_passes(of)}."


def _ppo(of: Mapping[str, Any]) -> str:
    told = (
        f"PPO: the policy {_named(of.get('from'))} is improved against {_named(of.get('reward'))} on prompts of "
        f"{_named(of.get('prompts'))}, {of.get('iterations')} iterations of {of.get('batch')} prompts × "
        f"{of.get('answers')} answers, while its reference holds it"
    )
    kl = of.get("kl") or {}
    if kl.get("target") is not None:
        told += f" near a KL of {kl['target']:g} nats a sequence"
    if kl.get("limit") is not None:
        told += f" (past {kl['limit']:g} it {'goes back' if kl.get('on_limit') == 'rollback' else 'stops'})"
    return f"{told}."


def _data(of: Mapping[str, Any]) -> str:
    return f"Data: {_named(of.get('files'))} cleaned and split by prompt, {100 * of.get('heldout', 0):g} % held out."


def _evaluate(of: Mapping[str, Any]) -> str:
    return f"Evaluation: the answers of {_named(of.get('models'))} to {_named(of.get('prompts'))}, compared."


def _passes(of: Mapping[str, Any]) -> str:
    epochs = of.get("epochs", 1)
    return "one pass over them" if epochs == 1 else f"{epochs:g} passes over them"
