"""Runs as a script reads them: their stages, metrics, events and samples, their models and their report.

Everything is read from the run's folder at the moment it is asked for, so a run may be followed while it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.api.models import load_from
from kedge.core.errors import ModelError, RunError
from kedge.core.suggest import did_you_mean
from kedge.runs import folder as folders
from kedge.runs.lineage import locate
from kedge.runs.manifest import Manifest, Status, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Record = dict[str, Any]


class StageRun:
    """One stage of a run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        manifest = self._manifest()
        self.name, self.kind = manifest.stage, manifest.kind

    @property
    def status(self) -> Status:
        """`running`, `done`, `failed`, `stopped` by a contract, `waiting` for people, or `interrupted`."""
        return folders.status_of(self.folder)

    @property
    def settings(self) -> Record:
        """Its settings, every default filled in."""
        return dict(self._manifest().settings)

    @property
    def outputs(self) -> dict[str, Path]:
        """The files and folders that it has made, by name; empty until it is done."""
        return {output.name: locate(output, self.folder) for output in self._manifest().outputs}

    @property
    def model(self) -> Path:
        """The folder of the model that it has made."""
        outputs = self.outputs
        if "model" not in outputs:
            made = f"it has made {', '.join(outputs)}" if outputs else f"it is {self.status}, and has made nothing yet"
            raise ModelError(f"{self.folder}: stage {self.name!r} has no model: {made}")
        return outputs["model"]

    def metrics(self) -> Iterator[Record]:
        """One record a step: `step`, `at` (seconds since 1970) and the metrics by name."""
        yield from self._open().read_metrics()

    def events(self) -> Iterator[Record]:
        """Warnings, stops, and what else was noticed on the way."""
        yield from self._open().read_events()

    def samples(self) -> Iterator[Record]:
        """Answers that were written down."""
        yield from self._open().read_samples()

    def load(self, *, dtype: str | None = None, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model that it has made and its tokenizer, as transformers knows them; `kedge.load_model` says more."""
        return load_from(self.model, dtype=dtype, device=device)

    def __repr__(self) -> str:
        return f"<stage {self.name!r} in {str(self.folder)!r}: {self.status}>"

    def _manifest(self) -> Manifest:
        return read_manifest(self.folder)

    def _open(self) -> folders.Run:
        return folders.Run.open(self.folder, for_writing=False)


class Run:
    """A run that is there: of a recipe, with a folder a stage, or the folder of one stage alone."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from kedge.report.writing import run_folder  # pages, charts and numpy, which a class of settings does not need

        self.folder = run_folder(Path(folder))

    @property
    def status(self) -> Status:
        """`running`, `done`, `failed`, `stopped` by a contract, `waiting` for people, or `interrupted`."""
        return folders.status_of(self.folder)

    @property
    def rounds(self) -> list[Run]:
        """The rounds that have begun, in order; none where the recipe has no rounds."""
        from kedge.report.rounds.records import rounds_below

        return [Run(folder) for folder in rounds_below(self.folder)]

    @property
    def stages(self) -> dict[str, StageRun]:
        """The stages that have begun, oldest first; of several rounds, those of the last one."""
        if rounds := self.rounds:
            return rounds[-1].stages
        if read_manifest(self.folder).stage:
            stages = [StageRun(self.folder)]
        else:
            stages = [StageRun(folder) for folder in folders.runs_in(self.folder)]
        return {stage.name: stage for stage in stages}

    def stage(self, name: str) -> StageRun:
        stages = self.stages
        if name not in stages:
            begun = ", ".join(stages) or "none"
            raise RunError(f"{self.folder}: no stage {name!r}{did_you_mean(name, stages)}; those that began: {begun}")
        return stages[name]

    def only_stage(self) -> StageRun:
        """The stage of a run that has one."""
        stages = self.stages
        if len(stages) != 1:
            raise RunError(f"{self.folder}: it has the stages {', '.join(stages)}; say which: run.stage(NAME)")
        return next(iter(stages.values()))

    def metrics(self, stage: str | None = None) -> Iterator[Record]:
        """The metrics of one stage, or of all in turn; each record has the name of its `stage` besides."""
        for each in self._asked(stage):
            yield from ({"stage": each.name, **record} for record in each.metrics())

    def events(self, stage: str | None = None) -> Iterator[Record]:
        """Warnings, stops, and what else was noticed on the way."""
        for each in self._asked(stage):
            yield from ({"stage": each.name, **record} for record in each.events())

    def samples(self, stage: str | None = None) -> Iterator[Record]:
        """Answers that were written down."""
        for each in self._asked(stage):
            yield from ({"stage": each.name, **record} for record in each.samples())

    def report(self) -> Path:
        """Write the page about the run as it is now; returns where it is."""
        from kedge.report.writing import write_report

        return write_report(self.folder, None)

    def __repr__(self) -> str:
        return f"<run {str(self.folder)!r}: {self.status}>"

    def _asked(self, stage: str | None) -> list[StageRun]:
        return list(self.stages.values()) if stage is None else [self.stage(stage)]
