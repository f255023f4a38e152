"""The entries of a comparison: the stage of each run that is compared, with its evaluation and its best-of-N curve.

A pipeline stands for the last of its stages that trained a policy. Nothing is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import ConfigError, RunError
from kedge.report.compare.calls import PaidCalls, paid_calls
from kedge.report.rounds.records import refuse_rounds
from kedge.report.run.run_records import Record, StageRecord, read_run
from kedge.runs.folder import runs_in

BEST_OF = "best-of.json"
METRICS = frozenset(
    {
        *("step", "at", "train/loss", "heldout/loss", "heldout/accuracy", "entropy/mean", "memory/peak_gib"),
        *("reward/mean", "gold/mean", "kl/mean", "length/mean", "tokens/per_second"),
        *("time/step", "time/generate", "time/judge", "time/update"),
    }
)
"""What tables, charts and sentences of a comparison read: of a long run, the rest would be read for nothing."""
_NO_POLICY = ("data", "reward", "evaluate", "tasks", "label", "exam", "gate", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One model in the evaluation of a pipeline. `measure` is equal for evaluations whose scores may be compared."""

    numbers: Record
    name: str
    measure: tuple[str, ...]
    scored_by: str = ""
    """What kind of reward its scores are of; empty where there are none."""

    @property
    def baseline(self) -> str:
        return self.numbers["baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run of the comparison."""

    label: str
    stage: StageRecord
    evaluated: Evaluated | None
    best_of: Record | None
    paid: PaidCalls

    @property
    def trained_on(self) -> str:
        """What kind of reward it was trained on; empty where on none."""
        return kind_of_reward(self.stage.settings.get("reward"))

    @property
    def method(self) -> str:
        """Its name in a recipe: the stage's kind, or its method where it has several, and whether it was online."""
        method: Any = self.stage.settings.get("method")
        name = method.get("kind") if isinstance(method, Mapping) else method
        return f"{'online ' if self.stage.settings.get('online') else ''}{name or self.stage.kind}"


def read_entries(folders: Sequence[Path]) -> list[Entry]:
    """The runs in their order, under names that distinguish them."""
    runs = [(folder, *_stages(folder)) for folder in folders]
    labels = _labels([(folder, stage) for folder, stage, _ in runs])
    return [
        Entry(
            label=label,
            stage=stage,
            evaluated=_evaluated(stage, around),
            best_of=_best_of(stage.folder / BEST_OF),
            paid=paid_calls(stage, around),
        )
        for label, (_, stage, around) in zip(labels, runs, strict=True)
    ]


def kind_of_reward(source: Any) -> str:
    """What kind of reward a source is: scores of one kind may be on one axis, those of two never are.

    >>> kind_of_reward("reward"), kind_of_reward({"kind": "judge", "model": "m"}), kind_of_reward({"kind": "exact"})
    ('reward model', 'judge m', 'exact')
    """
    match source:
        case str():
            return "reward model"
        case {"kind": "model"}:
            return "reward model"
        case {"kind": "judge", "model": model}:
            return f"judge {model}"
        case {"kind": "function", "path": path}:
            return f"function {path}"
        case {"kind": kind}:
            return str(kind)
        case _:
            return ""


def _stages(folder: Path) -> tuple[StageRecord, Sequence[StageRecord]]:
    """The stage to compare, and all stages of its pipeline."""
    refuse_rounds(folder)
    run = read_run(folder, only=METRICS)
    if not run.is_pipeline:
        stage = run.stages[0]
        if stage.kind in _NO_POLICY:
            raise ConfigError(f"{folder} is a stage of kind {stage.kind}, which trains no policy; name one that does")
        beside = [child for child in runs_in(folder.resolve().parent) if child != folder.resolve()]
        return stage, [stage, *(other for child in beside for other in read_run(child, only=()).stages)]
    trained = [stage for stage in run.stages if stage.kind not in _NO_POLICY]
    if not trained:
        raise ConfigError(f"{folder}: no stage of this pipeline has trained a policy yet; run it first")
    return trained[-1], run.stages


def _evaluated(stage: StageRecord, around: Sequence[StageRecord]) -> Evaluated | None:
    """The last evaluation beside the stage that has its model."""
    for other in reversed(around):
        names = [name for name in (other.evaluation or {}).get("models", {}) if name.partition(".")[0] == stage.name]
        if other.evaluation is not None and names:
            return Evaluated(
                numbers=other.evaluation,
                name=names[0],
                measure=_measure(other),
                scored_by=kind_of_reward(other.settings.get("reward")),
            )
    return None


def _measure(evaluation: StageRecord) -> tuple[str, ...]:
    """The prompts by content, and the sources of scores: by content where they are models, else by their settings."""
    inputs = evaluation.manifest.inputs
    hashes = [f"{artefact.name} {artefact.hash}" for artefact in inputs if artefact.name != "models"]
    hashed = {artefact.name.partition(".")[0] for artefact in inputs}
    settings = [
        f"{name} {evaluation.settings.get(name)}"
        for name in ("reward", "gold")
        if name in evaluation.settings and name not in hashed
    ]
    judges: Any = evaluation.settings.get("judge") or []
    asked = [
        " ".join(str(judge.get(name)) for name in ("kind", "name", "model", "url", "project", "rubric"))
        for judge in cast("list[Record]", judges if isinstance(judges, list) else [judges])
    ]
    return tuple(sorted([*hashes, *settings, *asked]))


def _best_of(path: Path) -> Record | None:
    try:
        return json.loads(path.read_bytes()) if path.exists() else None
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}). Remove it, or let its stage write it again.") from error


def _labels(runs: Sequence[tuple[Path, StageRecord]]) -> list[str]:
    """The shortest of stage, run/stage and folder that differs from run to run."""
    candidates = (
        [stage.name for _, stage in runs],
        [f"{stage.manifest.name}/{stage.name}" for _, stage in runs],
        [str(folder) for folder, _ in runs],
    )
    for labels in candidates:
        if len(set(labels)) == len(labels):
            return labels
    raise ConfigError(f"{', '.join(candidates[-1])}: a run is named twice; name each once")
