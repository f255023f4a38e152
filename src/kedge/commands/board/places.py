"""The folders of a board: which stages made models, which asked them, which decided about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kedge.core.errors import ConfigError, KedgeError
from kedge.core.suggest import did_you_mean
from kedge.gate.evidence import EVALUATION, EXAM
from kedge.gate.verdict import NAME as VERDICT
from kedge.runs.folder import runs_in
from kedge.runs.manifest import MANIFEST_NAME, ROUNDS, Manifest, read_manifest

_RESULTS = (EXAM, EVALUATION, VERDICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder with something for the board. `run` counts the runs as they were named, `number` the stages of each."""

    folder: Path
    run: int
    run_name: str
    number: int
    manifest: Manifest | None
    verdict_file: Path | None = None

    @property
    def has_exam(self) -> bool:
        return (self.folder / EXAM).is_file()

    @property
    def has_evaluation(self) -> bool:
        return (self.folder / EVALUATION).is_file()


@dataclass(slots=True)
class Places:
    places: list[Place] = field(default_factory=list[Place])
    problems: list[str] = field(default_factory=list[str])


def find_places(paths: Sequence[Path]) -> Places:
    """Everything in the runs, stages and folders that were named. A path that is not there is an error; one that
    cannot be read is a problem that the page tells."""
    found, known = Places(), set[Path]()
    for run, path in enumerate(paths):
        if not path.exists():
            near = did_you_mean(path.name, [child.name for child in path.parent.glob("*")])
            raise ConfigError(f"{path}: there is no such file or folder{near}. Name runs, stages or their folders.")
        try:
            for place in _places(path, run):
                own = (place.verdict_file or place.folder).resolve()
                if own not in known:
                    known.add(own)
                    found.places.append(place)
        except KedgeError as error:
            found.problems.append(str(error))
    return found


def _places(path: Path, run: int) -> Iterator[Place]:
    if path.is_file():
        if path.name == VERDICT or path.suffix == ".json":
            yield Place(
                folder=path.parent, run=run, run_name=path.parent.name, number=0, manifest=None, verdict_file=path
            )
        return
    manifest = read_manifest(path) if (path / MANIFEST_NAME).is_file() else None
    holds_runs = manifest is None or manifest.kind in ("pipeline", ROUNDS)
    stages = runs_in(path) if holds_runs else []
    name = manifest.name if manifest else path.name
    if manifest is not None and manifest.round is not None:
        name = f"{name}/round-{manifest.round}"
    if manifest is None or not holds_runs:
        yield _place(path, run, name, 0, manifest)
    for number, stage in enumerate(stages, start=1):
        inside = read_manifest(stage)
        if inside.kind in ("pipeline", ROUNDS):  # a folder of runs, or of rounds
            yield from _places(stage, run)
        else:
            yield _place(stage, run, name if manifest else inside.name, number, inside)


def _place(folder: Path, run: int, name: str, number: int, manifest: Manifest | None) -> Place:
    verdict = folder / VERDICT
    return Place(
        folder=folder,
        run=run,
        run_name=name,
        number=number,
        manifest=manifest,
        verdict_file=verdict if verdict.is_file() else None,
    )


def refuse_nothing(paths: Sequence[Path], found: Places) -> None:
    """Folders without any result have no board."""
    has_any = any(place.has_exam or place.has_evaluation or place.verdict_file for place in found.places)
    if has_any:
        return
    where = ", ".join(map(str, paths[:8]))
    broken = f" Not read: {'; '.join(found.problems)}." if found.problems else ""
    raise ConfigError(
        f"{where}: nothing to show: no {', '.join(_RESULTS[:-1])} or {VERDICT} is there.{broken} Stages of kind exam, "
        "evaluate and gate make them, and so do `kedge exam take` and `kedge gate`."
    )
