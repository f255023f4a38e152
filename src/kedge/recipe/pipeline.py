"""Runs a pipeline: stages in order, each in its own run folder. Resuming skips what is done and goes on with the rest.

A recipe without rounds is one; of a recipe with rounds, each round is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import kedge
from kedge.core.errors import ConfigError, ContractStop, KedgeError, ProcessLost, RunError, Waiting
from kedge.core.protocols import Metrics, Tracker
from kedge.core.seeds import seed_for
from kedge.core.settings import Section
from kedge.core.stage import Stage
from kedge.core.world import ALONE, World, acting_alone, once, replicated
from kedge.monitor.alerts import Alerts
from kedge.monitor.trackers import open_trackers
from kedge.monitor.trackers.forwarding import ForwardingTracker
from kedge.recipe.data_inputs import files_to_read
from kedge.recipe.inputs import inputs_of_stage, refuse_changed_inputs
from kedge.recipe.resuming import (
    accepted_changes,
    begun_stages,
    in_words,
    refuse_altered_journals,
    version_changes,
)
from kedge.recipe.schema import Recipe
from kedge.recipe.together import SharedTracker, refuse_unlike, refuse_unseen
from kedge.recipe.wiring import Link, Plan, connect
from kedge.report.writing import write_card, write_report
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import Run, RunTracker, status_of
from kedge.runs.lineage import describe, locate
from kedge.runs.manifest import MANIFEST_NAME, ROUNDS, Artefact, Status, environment, new_manifest, read_manifest
from kedge.stages.shared.context import Context, Say
from kedge.stages.shared.interrupt import StopRequest, terminable

_FIRST_LAYOUT: Final = (0, 2)
"""The first version whose checkpoints this one reads."""


@runtime_checkable
class _Checkpointed(Protocol):
    """Settings of a stage that writes checkpoints."""

    @property
    def checkpoints(self) -> CheckpointSettings: ...


OnStep = Callable[[str, int, Metrics], bool]
"""Given the stage, the step and its metrics after they were written; True asks the run to stop."""


def run_pipeline(
    folder: Path,
    recipe: Recipe,
    *,
    is_resumed: bool,
    say: Say,
    on_step: OnStep | None = None,
    write_inputs: Callable[[], None] = lambda: None,
    world: World = ALONE,
    device: str | None = None,
) -> Path:
    """Run every stage that is not done yet, in `folder`, and return it. `write_inputs` puts files into it that the
    stages read, before the first one begins.

    Where `on_step` or Ctrl-C asks to stop, it ends with KeyboardInterrupt, saved, and can be resumed. All processes of
    `world` call it alike; process 0 writes and speaks. `device` is that of this process, else the recipe's.
    """
    plan = connect(recipe)
    _refuse_what_cannot_run(recipe)
    refuse_unlike(world, recipe)
    refuse_unseen(world, folder)
    around = _Around(
        say=say if world.rank == 0 else lambda _: None,
        stop=StopRequest(world),
        on_step=on_step,
        world=world,
        device=device or recipe.settings.device,
    )
    open_run = partial(open_pipeline, recipe, folder, is_resumed=is_resumed, say=around.say)
    with terminable(), Run.shared(world, open_run) as pipeline:
        around.say(f"run folder: {folder}")
        with reported(folder, around.say, world), finished(pipeline, RunTracker(pipeline)):
            once(world, write_inputs)
            for name in plan.order:
                around.stop.agree()
                if around.stop.is_asked:  # after the last step of the stage before
                    raise KeyboardInterrupt
                _run_stage(name, recipe, plan, folder, around)
    around.say(f"done: {folder}")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What the stages of a run share, besides the recipe."""

    say: Say
    stop: StopRequest
    on_step: OnStep | None
    world: World
    device: str


@contextmanager
def reported(folder: Path, say: Say, world: World) -> Generator[None]:
    """However it ends, but for a kill, there is a page about it. One that cannot be written hides no other error."""
    if world.rank:
        yield
        return
    try:
        yield
    except BaseException:
        try:
            say(f"report: {write_report(folder, None)}")
        except (OSError, KedgeError) as error:
            say(f"there is no report: {error}")
        raise
    say(f"report: {write_report(folder, None)}")


def _refuse_what_cannot_run(recipe: Recipe) -> None:
    unfit = [name for name, stage in recipe.kinds.items() if stage.run is None]
    if unfit:
        raise ConfigError(
            f"{recipe.file}: this version of Kedge can check these stages but not run them: {', '.join(unfit)}; "
            "nothing was started"
        )


def open_pipeline(recipe: Recipe, folder: Path, *, is_resumed: bool, say: Say) -> Run:
    """The run of a whole recipe: a new one, or the one that is there to go on with."""
    resolved, place = recipe.resolved(), recipe.round
    if not (folder / MANIFEST_NAME).exists():
        if is_resumed:
            raise ConfigError(f"{folder}: there is no run to resume; leave out --resume to start one")
        manifest = new_manifest(
            name=recipe.settings.name,
            kind=ROUNDS if recipe.settings.rounds else "pipeline",
            seed=recipe.settings.seed,
            settings=resolved,
            round=place.number if place else None,
            previous=place.previous if place else None,
        )
        return Run.create(folder, manifest=manifest)
    if not is_resumed:
        raise ConfigError(
            f"{folder}: there is a run of this name already ({status_of(folder)}); use --resume to go on with it "
            "(in Python: resume=True), or --set name=ANOTHER to start anew"
        )
    _refuse_older_layout(folder)
    changes = accepted_changes(folder, recipe)
    before = read_manifest(folder)
    for home in (folder, *(folder / name for name in begun_stages(folder, tuple(recipe.stages)))):
        refuse_altered_journals(home)
    run = Run.open(folder, for_writing=True)
    run.reopen(settings=resolved, environment=environment(device=before.environment.device))
    if changes:
        message = "settings have changed since the run was started: " + "; ".join(map(str, changes))
        run.event("info", "settings.changed", message, changes=[change.as_dict() for change in changes])
        for change in changes:
            say(f"changed: {change}")
    if versions := version_changes(before.environment, run.manifest.environment):
        message = f"versions have changed since the run was last written to: {in_words(versions)}"
        run.event("info", "versions.changed", message, versions=versions)
        say(message)
    return run


def _refuse_older_layout(folder: Path) -> None:
    """Version 0.2 lays checkpoints out anew, and what an older one wrote cannot be gone on with."""
    made_by = read_manifest(folder).environment.kedge
    if tuple(int(part) for part in re.findall(r"\d+", made_by)[:2]) < _FIRST_LAYOUT:
        raise ConfigError(
            f"{folder}: this run was made by Kedge {made_by}, whose checkpoints have another layout than those of "
            f"{kedge.__version__}; start a new run with --set name=ANOTHER, or go on with it in Kedge {made_by}"
        )


def _run_stage(name: str, recipe: Recipe, plan: Plan, folder: Path, around: _Around) -> None:
    from kedge.stages.shared.device import few_host_threads  # torch: late, for a recipe that cannot run
    from kedge.stages.shared.peak_memory import report_peak_memory

    stage, home = recipe.kinds[name], folder / name
    run_stage = stage.load_run()
    assert run_stage is not None
    world, links = around.world, plan.links[name]
    sources = once(world, lambda: [_source(link, folder) for link in links])
    inputs = once(world, lambda: inputs_of_stage(name, recipe, links, sources, home))
    if once(world, lambda: _is_done(name, inputs, home)):
        around.say(f"{name}: done before, kept")
        return
    run = Run.shared(world, partial(_open_stage, name, recipe, inputs, home, around.say))
    around.say(f"{name}: {stage.summary}")
    with run, _tracked(run, recipe, name, around) as tracker, finished(run, tracker) as outputs:
        seed = seed_for(recipe.settings.seed, name)
        context = Context(
            name=name,
            seed=seed,
            split_seed=seed_for(recipe.round.first_seed, name) if recipe.round else seed,
            run=run,
            tracker=tracker,
            device=around.device,
            chat_template=recipe.chat_template,
            recipe_folder=recipe.file.parent,
            round=recipe.round.number if recipe.round else 0,
            sources=once(world, lambda: files_to_read(links, sources, home, seed=seed)),
            say=around.say,
            stop=around.stop,
            world=world
            if hasattr(recipe.stages[name], "micro_batch")
            else replicated(world),  # only what learns is cut
        )
        with world.explaining(), report_peak_memory(tracker, context.device), few_host_threads(context.device):
            made = run_stage(context, recipe.stages[name])
        outputs.extend(once(world, lambda: _describe_outputs(run, stage, made)))


def _is_done(name: str, inputs: Sequence[Artefact], home: Path) -> bool:
    """Whether an earlier process has done the stage; refused where its inputs are not what they were."""
    if not (home / MANIFEST_NAME).exists():
        return False
    refuse_changed_inputs(name, inputs, read_manifest(home), home)
    return status_of(home) == "done"


def _open_stage(name: str, recipe: Recipe, inputs: Sequence[Artefact], home: Path, say: Say) -> Run:
    if (home / MANIFEST_NAME).exists():
        return _reopen_stage(name, recipe, inputs, home, say)
    return _create_stage(name, recipe, inputs, home)


def _describe_outputs(run: Run, stage: Stage, made: Mapping[str, Path]) -> list[Artefact]:
    for output, path in made.items():
        if stage.makes[output] in ("model", "reward_model"):
            write_card(run, path)
    return [describe(output, stage.makes[output], path, run_folder=run.folder) for output, path in made.items()]


def _create_stage(name: str, recipe: Recipe, inputs: Sequence[Artefact], home: Path) -> Run:
    settings = recipe.stages[name].model_dump(mode="json", by_alias=True)
    manifest = new_manifest(
        name=recipe.settings.name,
        stage=name,
        kind=settings["kind"],
        seed=recipe.settings.seed,
        settings=settings,
        inputs=inputs,
        threads=_num_threads(),
        round=recipe.round.number if recipe.round else None,
    )
    return Run.create(home, manifest=manifest, keep=_keep(recipe.stages[name]))


def _reopen_stage(name: str, recipe: Recipe, inputs: Sequence[Artefact], home: Path, say: Say) -> Run:
    """Go on with a stage that is not done; without a checkpoint, from its beginning."""
    before = read_manifest(home)
    run = Run.open(home, for_writing=True, keep=_keep(recipe.stages[name]))
    here = environment(device=before.environment.device, threads=_num_threads())
    run.reopen(
        settings=recipe.stages[name].model_dump(mode="json", by_alias=True), environment=here, inputs=tuple(inputs)
    )
    if not run.checkpoints.steps() and run.has_later_records(None):
        run.resume_at(None)
    if versions := version_changes(before.environment, here):
        message = f"versions have changed since this stage was last written to: {in_words(versions)}"
        run.event("info", "versions.changed", message, versions=versions)
    threads = before.environment.threads
    if threads is not None and threads != here.threads:
        message = f"{name}: goes on with {here.threads} threads, it had {threads}: sums may differ in their last bits"
        run.event("info", "threads.changed", message, before=threads, after=here.threads)
        say(message)
    return run


def _num_threads() -> int:
    import torch  # late, for a recipe that cannot run

    return torch.get_num_threads()


def _keep(settings: Section) -> CheckpointSettings | None:
    return settings.checkpoints if isinstance(settings, _Checkpointed) else None


@contextmanager
def _tracked(run: Run, recipe: Recipe, stage: str, around: _Around) -> Generator[Tracker]:
    if around.world.size > 1:
        with ExitStack() as stack:
            alone = replace(around, world=ALONE)
            with acting_alone():
                inner = None if around.world.rank else stack.enter_context(_tracked(run, recipe, stage, alone))
            try:
                yield SharedTracker(around.world, inner, around.stop)
            finally:
                with acting_alone():  # a run that fails in one process closes without the others
                    stack.close()
        return
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
def finished(run: Run, tracker: Tracker) -> Generator[list[Artefact]]:
    """Whatever happens inside, the manifest says how it ended. What is put into the list becomes the run's outputs."""
    outputs: list[Artefact] = []
    try:
        yield outputs
    except ContractStop as stop:
        event = {"level": "fatal", "code": "run.stopped", "message": str(stop)}
        _end_badly(run, tracker, "stopped", event, outputs)
        raise
    except Waiting as waiting:
        _end_badly(run, tracker, "waiting", {"level": "info", "code": "run.waiting", "message": str(waiting)})
        raise
    except (KeyboardInterrupt, ProcessLost):
        _end_badly(run, tracker, "interrupted", None)
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        _end_badly(run, tracker, "failed", {"level": "fatal", "code": "run.failed", "message": message})
        raise
    except SystemExit as exit:
        # Code of the user's, in a callback or a plugin, must not end a run that is not done as if it were.
        message = f"code that the run called ended the program (SystemExit: {exit.code})"
        _end_badly(run, tracker, "failed", {"level": "fatal", "code": "run.failed", "message": message})
        if not exit.code:
            raise RunError(message) from exit
        raise
    except BaseException:
        _end_badly(run, tracker, "failed", None)
        raise
    run.finish("done", outputs=outputs)


def _end_badly(
    run: Run, tracker: Tracker, ending: Status, event: Mapping[str, Any] | None, outputs: Sequence[Artefact] = ()
) -> None:
    """Write down how a run ended; where the disk refuses that too, the error that ended it is the one to hear of.

    Nobody is waited for: the other processes may be gone, or may know nothing of the error.
    """
    if run.world.rank:
        return
    with acting_alone():
        with suppress(OSError):
            if event:
                tracker.event(event)
        with suppress(OSError):
            run.finish(ending, outputs=outputs)


def _source(link: Link, folder: Path) -> str:
    """The file or model behind an input; for another stage, what its manifest says it made."""
    if not link.stage:
        return link.source()
    home = folder / (link.home or link.stage)
    recorded = {output.name: output for output in read_manifest(home).outputs}
    return str(locate(recorded[link.output], home))
