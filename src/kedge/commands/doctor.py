"""What `kedge doctor` does: a run folder in, a diagnosis of each of its stages and a change of the recipe out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kedge.commands.command_line import kedge_command
from kedge.core.errors import ConfigError, RunError
from kedge.monitor.doctor import Change, Diagnosis, History, diagnose
from kedge.report.rounds.records import refuse_rounds
from kedge.report.run.run_records import REWARD_REPORT
from kedge.report.writing import run_folder
from kedge.runs.folder import Run, runs_in
from kedge.runs.manifest import read_manifest
from kedge.runs.reading import read_metrics, read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One stage with its diagnosis."""

    pipeline: str
    stage: str
    kind: str
    status: str
    diagnosis: Diagnosis

    def as_dict(self) -> dict[str, Any]:
        about = {"pipeline": self.pipeline, "stage": self.stage, "kind": self.kind, "status": self.status}
        return {**about, **self.diagnosis.as_dict(), "recipe": list(recipe_diff(self.stage, self.diagnosis.changes))}


def examine(run: Path) -> list[Examined]:
    """Every stage of a pipeline that has begun, in that order, or the one stage whose folder this is."""
    folder = run_folder(run)
    refuse_rounds(folder)
    try:
        stages = runs_in(folder) or [folder]
        return [_examined(stage) for stage in stages]
    except RunError as error:
        raise ConfigError(f"{folder} cannot be read as a run: {error}") from error


def recipe_diff(stage: str, changes: Sequence[Change]) -> Iterator[str]:
    """The changes as lines of a diff of the recipe: what stays has a space in front, what goes a -, what comes a +."""
    if not changes:
        return
    yield " stages:"
    yield f"   {stage}:"
    yield from _nested([(change.key.split("."), change) for change in changes], indent=4)


def next_command(examined: Sequence[Examined]) -> str | None:
    """The command that runs the recipe with every change; None when there is none."""
    wanted = [
        f"stages.{examination.stage}.{change.key}={_yaml(change.new)}"
        for examination in examined
        for change in examination.diagnosis.changes
    ]
    if not wanted:
        return None
    overrides = [f"name={examined[0].pipeline}-2", *wanted]
    return f"{kedge_command()} run RECIPE " + " ".join(f"--set {shlex.quote(override)}" for override in overrides)


def history_of(folder: Path) -> History:
    """What the folder of one stage says of it."""
    run = Run.open(folder, for_writing=False)
    return History(
        kind=run.manifest.kind,
        metrics=read_metrics(run.metrics.path).table,
        events=list(read_records(run.events.path).records),
        samples=read_records(run.samples.path).records,
        settings=run.manifest.settings,
        status=run.status,
        reward_report=_reward_report(folder),
    )


def _reward_report(folder: Path) -> dict[str, Any]:
    """Empty where there is none: of another kind of stage, or of one that is not done."""
    file = folder / REWARD_REPORT
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise RunError(f"{file}: damaged: {error}") from error


def _examined(folder: Path) -> Examined:
    history, manifest = history_of(folder), read_manifest(folder)
    diagnosis = _with_alterations(diagnose(history), Run.open(folder, for_writing=False))
    return Examined(
        pipeline=manifest.name,
        stage=manifest.stage or folder.name,
        kind=history.kind,
        status=history.status,
        diagnosis=diagnosis,
    )


def _with_alterations(diagnosis: Diagnosis, run: Run) -> Diagnosis:
    """A diagnosis of journals that were altered says so first: it may not be about what happened."""
    altered = tuple(map(str, run.alterations()))
    if not altered:
        return diagnosis
    doubt = "Its journals were altered after they had been written, so this may not be what happened."
    verdict = f"{doubt} {diagnosis.verdict}"
    return replace(diagnosis, is_healthy=False, verdict=verdict, notes=(*altered, *diagnosis.notes))


def _nested(changes: Sequence[tuple[list[str], Change]], *, indent: int) -> Iterator[str]:
    """Settings of one section stand together, in the order of their first change."""
    sections: dict[str, list[tuple[list[str], Change]]] = {}
    for path, change in changes:
        sections.setdefault(path[0], []).append((path[1:], change))
    for name, inside in sections.items():
        if inside[0][0]:
            yield f" {' ' * indent}{name}:"
            yield from _nested(inside, indent=indent + 2)
        else:
            change = inside[0][1]
            yield f"-{' ' * indent}{name}: {_yaml(change.old)}"
            yield f"+{' ' * indent}{name}: {_yaml(change.new)}"


def _yaml(value: Any) -> str:
    """JSON is YAML; floats read better without the zero that Python pads exponents with.

    >>> _yaml(None), _yaml(3e-05), _yaml(0.1), _yaml("scale")
    ('null', '3e-5', '0.1', 'scale')
    """
    if isinstance(value, str):
        return value
    return json.dumps(value).replace("e-0", "e-")
