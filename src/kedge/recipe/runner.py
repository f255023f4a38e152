"""Runs a recipe: stages in order, each in its own run folder. Resuming skips what is done and goes on with the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import kedge
from kedge.core.errors import ConfigError, ContractStop, RunError
from kedge.core.protocols import Metrics, Tracker
from kedge.core.seeds import seed_for
from kedge.core.settings import Section
from kedge.core.stage import MayChange
from kedge.monitor.alerts import Alerts
from kedge.monitor.trackers import open_trackers
from kedge.monitor.trackers.forwarding import ForwardingTracker
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, Plan, connect
from kedge.report.writing import write_card, write_report
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import Run, RunTracker, status_of
from kedge.runs.lineage import describe, locate
from kedge.runs.manifest import MANIFEST_NAME, Artefact, Status, new_manifest, read_manifest
from kedge.stages.shared.context import Context, Say
from kedge.stages.shared.interrupt import StopRequest

_FIRST_LAYOUT: Final = (0, 2)
"""The first version whose checkpoints this one reads."""


@runtime_checkable
class _Checkpointed(Protocol):
    """Settings of a stage that writes checkpoints."""

    @property
    def checkpoints(self) -> CheckpointSettings: ...


OnStep = Callable[[str, int, Metrics], bool]
"""Given the stage, the step and its metrics after they were written; True asks the run to stop."""


def run_recipe(recipe: Recipe, runs: Path, *, is_resumed: bool, say: Say) -> Path:
    """Run every stage that is not done yet, in `runs/NAME`; returns that folder."""
    return run_in(runs / recipe.settings.name, recipe, is_resumed=is_resumed, say=say)


def run_in(
    folder: Path,
    recipe: Recipe,
    *,
    is_resumed: bool,
    say: Say,
    on_step: OnStep | None = None,
    write_inputs: Callable[[], None] = lambda: None,
) -> Path:
    """The same in any folder. `write_inputs` puts files into it that the stages read, before the first one begins.

    Where `on_step` or Ctrl-C asks to stop, it ends with KeyboardInterrupt, saved, and can be resumed.
    """
    plan = connect(recipe)
    _refuse_what_cannot_run(recipe)
    with _open_pipeline(recipe, folder, is_resumed=is_resumed) as pipeline:
        say(f"run folder: {folder}")
        stop = StopRequest()
        with _reported(folder, say), _finished(pipeline, RunTracker(pipeline)):
            write_inputs()
            for name in plan.order:
                if stop.is_asked:  # after the last step of the stage before
                    raise KeyboardInterrupt
                _run_stage(name, recipe, plan, folder, _Around(say=say, stop=stop, on_step=on_step))
    say(f"done: {folder}")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What the stages of a run share, besides the recipe."""

    say: Say
    stop: StopRequest
    on_step: OnStep | None


@contextmanager
def _reported(folder: Path, say: Say) -> Generator[None]:
    """However it ends, but for a kill, there is a page about it."""
    try:
        yield
    finally:
        say(f"report: {write_report(folder, None)}")


def _refuse_what_cannot_run(recipe: Recipe) -> None:
    unfit = [name for name, stage in recipe.kinds.items() if stage.run is None]
    if unfit:
        raise ConfigError(
            f"{recipe.file}: this version of Kedge can check these stages but not run them: {', '.join(unfit)}; "
            "nothing was started"
        )


def _open_pipeline(recipe: Recipe, folder: Path, *, is_resumed: bool) -> Run:
    resolved = recipe.resolved()
    if not (folder / MANIFEST_NAME).exists():
        if is_resumed:
            raise ConfigError(f"{folder}: there is no run to resume; leave out --resume to start one")
        manifest = new_manifest(
            name=recipe.settings.name, kind="pipeline", seed=recipe.settings.seed, settings=resolved
        )
        return Run.create(folder, manifest=manifest)
    if not is_resumed:
        raise ConfigError(
            f"{folder}: there is a run of this name already ({status_of(folder)}); use --resume to go on with it "
            "(in Python: resume=True), or --set name=ANOTHER to start anew"
        )
    _refuse_older_layout(folder)
    changed = _differences(_fixed(recipe, dict(read_manifest(folder).settings)), _fixed(recipe, resolved))
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise ConfigError(
            f"{folder}: the recipe has changed since this run was started, and a resumed run must be the same run:\n"
            f"{listed}\nUndo the change, or start a new run with --set name=ANOTHER"
        )
    return _reopened(folder, None)


def _refuse_older_layout(folder: Path) -> None:
    """Version 0.2 lays checkpoints out anew, and what an older one wrote cannot be gone on with."""
    made_by = read_manifest(folder).environment.kedge
    if tuple(int(part) for part in re.findall(r"\d+", made_by)[:2]) < _FIRST_LAYOUT:
        raise ConfigError(
            f"{folder}: this run was made by Kedge {made_by}, whose checkpoints have another layout than those of "
            f"{kedge.__version__}; start a new run with --set name=ANOTHER, or go on with it in Kedge {made_by}"
        )


def _run_stage(name: str, recipe: Recipe, plan: Plan, folder: Path, around: _Around) -> None:
    from kedge.stages.shared.peak_memory import report_peak_memory  # torch: late, for a recipe that cannot run

    stage, home = recipe.kinds[name], folder / name
    run_stage = stage.load_run()
    assert run_stage is not None
    sources = [_source(link, folder) for link in plan.links[name]]
    inputs = [_artefact(link, source, home) for link, source in zip(plan.links[name], sources, strict=True)]
    if (home / MANIFEST_NAME).exists():
        _refuse_changed_inputs(name, inputs, home)
        if status_of(home) == "done":
            around.say(f"{name}: done before, kept")
            return
        run = _reopened(home, _keep(recipe.stages[name]))
    else:
        run = _create_stage(name, recipe, inputs, home)
    around.say(f"{name}: {stage.summary}")
    by_field: dict[str, list[str]] = {}
    for link, source in zip(plan.links[name], sources, strict=True):
        by_field.setdefault(link.field, []).append(source)
    with run, _tracked(run, recipe, name, around) as tracker, _finished(run, tracker) as outputs:
        context = Context(
            name=name,
            seed=seed_for(recipe.settings.seed, name),
            run=run,
            tracker=tracker,
            device=recipe.settings.device,
            chat_template=recipe.chat_template,
            recipe_folder=recipe.file.parent,
            sources=by_field,
            say=around.say,
            stop=around.stop,
        )
        with report_peak_memory(tracker, context.device):
            made = run_stage(context, recipe.stages[name])
        for output, path in made.items():
            if stage.makes[output] in ("model", "reward_model"):
                write_card(run, path)
        outputs.extend(describe(output, stage.makes[output], path, run_folder=home) for output, path in made.items())


def _create_stage(name: str, recipe: Recipe, inputs: Sequence[Artefact], home: Path) -> Run:
    settings = recipe.stages[name].model_dump(mode="json", by_alias=True)
    manifest = new_manifest(
        name=recipe.settings.name,
        stage=name,
        kind=settings["kind"],
        seed=recipe.settings.seed,
        settings=settings,
        inputs=inputs,
    )
    return Run.create(home, manifest=manifest, keep=_keep(recipe.stages[name]))


def _reopened(folder: Path, keep: CheckpointSettings | None) -> Run:
    run = Run.open(folder, for_writing=True, keep=keep)
    run.reopen()
    return run


def _keep(settings: Section) -> CheckpointSettings | None:
    return settings.checkpoints if isinstance(settings, _Checkpointed) else None


@contextmanager
def _tracked(run: Run, recipe: Recipe, stage: str, around: _Around) -> Generator[Tracker]:
    name = f"{recipe.settings.name}/{stage}"
    tracker = open_trackers(RunTracker(run), recipe.settings.trackers, run_folder=run.folder, name=name)
    if recipe.settings.alerts:
        tracker = Alerts(tracker, recipe.settings.alerts, run=name)
    if around.on_step:
        tracker = _CallingTracker(tracker, partial(around.on_step, stage), around.stop)
    try:
        yield tracker
    finally:
        tracker.close()


class _CallingTracker(ForwardingTracker):
    """Calls a function with every step after it was written; where that gives True, the run is asked to stop."""

    def __init__(self, inner: Tracker, on_step: Callable[[int, Metrics], bool], stop: StopRequest) -> None:
        super().__init__(inner)
        self._on_step = on_step
        self._stop = stop

    def log(self, metrics: Metrics, *, step: int) -> None:
        super().log(metrics, step=step)
        if self._on_step(step, {name: float(value) for name, value in metrics.items()}):
            self._stop.ask()


@contextmanager
def _finished(run: Run, tracker: Tracker) -> Generator[list[Artefact]]:
    """Whatever happens inside, the manifest says how it ended. What is put into the list becomes the run's outputs."""
    outputs: list[Artefact] = []
    ending: Status = "failed"
    try:
        yield outputs
        ending = "done"
    except ContractStop as stop:
        ending = "stopped"
        tracker.event({"level": "fatal", "code": "run.stopped", "message": str(stop)})
        raise
    except KeyboardInterrupt:
        ending = "interrupted"
        raise
    except Exception as error:
        tracker.event({"level": "fatal", "code": "run.failed", "message": f"{type(error).__name__}: {error}"})
        raise
    except SystemExit as exit:
        # Code of the user's, in a callback or a plugin, must not end a run that is not done as if it were.
        message = f"code that the run called ended the program (SystemExit: {exit.code})"
        tracker.event({"level": "fatal", "code": "run.failed", "message": message})
        if not exit.code:
            raise RunError(message) from exit
        raise
    finally:
        run.finish(ending, outputs=outputs if ending == "done" else ())


def _source(link: Link, folder: Path) -> str:
    """The file or model behind an input; for another stage, what its manifest says it made."""
    if not link.stage:
        return link.source()
    home = folder / link.stage
    made = {output.name: output for output in read_manifest(home).outputs}
    return str(locate(made[link.output], home))


def _artefact(link: Link, source: str, home: Path) -> Artefact:
    """An input by its content. What lives on a hub is known by its name alone until it is loaded."""
    from kedge.models.loading.aliases import ALIASES, folder_of

    path = folder_of(source) if source in ALIASES and not link.is_data else Path(source)
    kind = link.kinds[0]
    if path.exists():
        return describe(link.field, kind, path, run_folder=home)
    return Artefact(name=link.field, kind=kind, path=source, hash="hub")


def _refuse_changed_inputs(name: str, inputs: Sequence[Artefact], home: Path) -> None:
    before = [(one.name, one.path, one.hash) for one in read_manifest(home).inputs]
    changed = [one.path for one, old in zip(inputs, before, strict=False) if (one.name, one.path, one.hash) != old]
    if changed or len(inputs) != len(before):
        what = ", ".join(changed) or f"{len(before)} then, {len(inputs)} now"
        raise ConfigError(
            f"{home}: inputs of stage {name!r} have changed since it was started: {what}; "
            "restore them, or start a new run with --set name=ANOTHER"
        )


def _fixed(recipe: Recipe, resolved: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without the settings that may change from one resumption to the next."""
    stages = {
        name: _without_changeable(settings, recipe.stages[name]) if name in recipe.stages else settings
        for name, settings in resolved["stages"].items()
    }
    return {**_without_changeable(resolved, recipe.settings), "stages": stages}


def _without_changeable(values: dict[str, Any], settings: Section) -> dict[str, Any]:
    fixed = dict(values)
    for name, info in type(settings).model_fields.items():
        key, part = info.alias or name, getattr(settings, name)
        if any(isinstance(mark, MayChange) for mark in info.metadata):
            fixed.pop(key, None)
        elif isinstance(part, Section) and isinstance(fixed.get(key), dict):
            fixed[key] = _without_changeable(fixed[key], part)
    return fixed


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    """What differs between two resolved recipes, a line each.

    >>> _differences({"seed": 1, "a": {"lr": 2}}, {"seed": 1, "a": {"lr": 3}})
    ['a.lr: was 2, is 3']
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{path}: was {before!r}, is {after!r}"]
    old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", after)
    keys = dict.fromkeys((*old, *new))
    return [
        line
        for key in keys
        for line in _differences(old.get(key, "absent"), new.get(key, "absent"), f"{path}.{key}" if path else key)
    ]
