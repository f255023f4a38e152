"""A run's folder as a report needs it: one record a stage, and the parts that are missing, by name.

A pipeline and a single stage are read alike; running, interrupted and finished runs too. Nothing is changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import RunError
from kedge.core.metric_table import as_table
from kedge.runs.folder import Run, runs_in, status_of
from kedge.runs.manifest import Manifest, Status
from kedge.runs.reading import MetricFeed, RecordFeed

Record = Mapping[str, Any]

REWARD_REPORT, EVALUATION = "reward-report.json", "evaluation.json"
LOOKS = "exams/000000/exam.json"
_UNTRAINED = ("data", "evaluate", "tasks", "label", "exam", "gate", "drift")
"""Kinds of stages that train nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage. `reward_report` and `evaluation` are what those stages wrote, None where there is none."""

    folder: Path
    manifest: Manifest
    status: Status
    metrics: Sequence[Record]
    events: Sequence[Record]
    samples: Sequence[Record]
    reward_report: Record | None
    evaluation: Record | None
    missing: tuple[str, ...]
    """Parts that a reader may look for and why they are absent, a sentence each."""
    looks: Record | None = None
    """What the exams are that looked at the policy while it trained; None where there were none."""

    @property
    def name(self) -> str:
        return self.manifest.stage or self.manifest.name

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.manifest.settings

    @property
    def last_step(self) -> int | None:
        steps = as_table(self.metrics).finite("step")
        return int(steps.max()) if len(steps) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A pipeline with its stages in the order in which they began, or one stage on its own."""

    folder: Path
    manifest: Manifest
    status: Status
    events: Sequence[Record]
    stages: tuple[StageRecord, ...]
    unstarted: tuple[str, ...]
    """Stages of the recipe that have no folder yet."""

    @property
    def is_pipeline(self) -> bool:
        return self.manifest.kind == "pipeline"


def read_run(folder: Path, *, only: Collection[str] | None = None) -> RunRecord:
    """Everything that a report needs, from disk. `only` names the metrics to read: None reads all, and an empty one
    no journal. Whether journals were altered is checked where all is read: it takes as long as the reading."""
    run = Run.open(folder, for_writing=False)
    if run.manifest.kind != "pipeline":
        stage = _read_stage(folder, only)
        return RunRecord(
            folder=folder, manifest=stage.manifest, status=stage.status, events=(), stages=(stage,), unstarted=()
        )
    stages = tuple(_read_stage(child, only) for child in runs_in(folder))
    begun = {stage.manifest.stage for stage in stages}
    return RunRecord(
        folder=folder,
        manifest=run.manifest,
        status=status_of(folder),
        events=run.read_events(),
        stages=stages,
        unstarted=tuple(name for name in run.manifest.settings.get("stages", {}) if name not in begun),
    )


def _read_stage(folder: Path, only: Collection[str] | None) -> StageRecord:
    run = Run.open(folder, for_writing=False)
    metrics = MetricFeed(run.metrics.path, only=only)
    events, samples = RecordFeed(run.events.path), RecordFeed(run.samples.path)
    if only is None or only:
        for journal in (metrics, events, samples):
            journal.poll()
    half = [
        f"{name}.jsonl ends in half a line, which is left out: its writer was killed, or is at work just now"
        for name, journal in {"metrics": metrics, "events": events, "samples": samples}.items()
        if journal.is_cut_off
    ]
    record = StageRecord(
        folder=folder,
        manifest=run.manifest,
        status=status_of(folder),
        metrics=metrics.table,
        events=list(events.records),
        samples=samples.records,
        reward_report=_json(folder / REWARD_REPORT),
        evaluation=_json(folder / EVALUATION),
        missing=(),
        looks=_json(folder / LOOKS),
    )
    altered = _altered(run) if only is None else ()
    return replace(record, missing=(*half, *altered, *_missing(record)))


def _altered(run: Run) -> Iterator[str]:
    """Journals that are not as they were written, or that were written without a chain by which that could be known."""
    yield from (f"{alteration} (its journal was altered after it had been written)" for alteration in run.alterations())
    journals = (run.metrics, run.events, run.samples)
    unchained = [journal.path.name for journal in journals if not journal.has_chain and journal.path.exists()]
    if unchained:
        yield f"whether {', '.join(unchained)} were altered cannot be checked: an older version wrote them"


def _missing(record: StageRecord) -> Iterator[str]:
    trains = record.kind not in _UNTRAINED
    if trains and not record.metrics:
        yield "there are no metrics: no step was finished"
    if record.kind in ("sft", "ppo", "preference") and not record.samples:
        yield "there are no samples: none was asked for, or none was taken yet"
    if record.kind == "reward" and record.reward_report is None:
        yield f"there is no {REWARD_REPORT}: it is written when training ends"
    if record.kind == "evaluate" and record.evaluation is None:
        yield f"there is no {EVALUATION}: it is written when the evaluation ends"
    if trains and record.status == "done" and not (record.folder / "model").is_dir():
        yield "there is no model/ folder: it was moved or removed after the run"


def _json(path: Path) -> Record | None:
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}). Remove it, or let its stage write it again.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is a {type(content).__name__}, not an object. Let its stage write it again.")
    return cast(Record, content)
