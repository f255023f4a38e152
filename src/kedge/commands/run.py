"""`kedge run`: in this process, as one of those that torchrun or srun started, or in several that are started here."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kedge.commands.checks.groups import layout_of, refuse_groups
from kedge.commands.checks.machine import gpus_of, num_sampling
from kedge.commands.checks.sharding import refuse_unsharded
from kedge.core.errors import ConfigError, ContractStop, KedgeError, ProcessLost, RunError
from kedge.core.world import ALONE, World, once
from kedge.recipe.placement import num_processes
from kedge.recipe.schema import Recipe
from kedge.runs.folder import Run, status_of
from kedge.runs.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from kedge.runtime.groups import Groups

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun, and by our own launcher: how many times the processes were started before."""
_RAY_COPIES: Final = "working_dir_files"
"""Where Ray unpacks the working directory of a job (`ray job submit --working-dir`): on each machine a copy."""


class RunRecipe(Protocol):
    """Runs the recipe in this process, one of `world`, on `device` (None: the recipe's), with RL roles in `groups`."""

    def __call__(self, world: World, device: str | None, *, is_resumed: bool, groups: Groups | None = None) -> Any: ...


def run_placed(
    recipe: Recipe,
    folder: Path,
    *,
    is_resumed: bool,
    command: Sequence[str],
    check: Callable[[], None],
    run: RunRecipe,
    say: Callable[[str], None],
) -> int:
    """Run a recipe where its placement says; gives the exit code. `command` runs it in one process of several.

    `check` refuses what cannot run, and is called once, before anything is started.
    """
    _refuse_copy_of_ray(folder)
    from kedge.runtime.processes import place_of  # torch: late, for a recipe that cannot be read

    place = place_of(os.environ)
    if recipe.settings.placement.groups is not None:
        if place is not None:
            raise ConfigError(
                f"placement.groups: one process drives the groups, and {place.size} were started; start `kedge run` "
                "once, without torchrun or srun (under Slurm: ray symmetric-run)"
            )
        return _run_driving(recipe, is_resumed=is_resumed, check=check, run=run)
    if place is not None:
        return _run_joined(recipe, folder, place, is_resumed=is_resumed, check=check, run=run)
    count = _count(recipe)
    if not is_resumed:
        check()
    refuse_unsharded(recipe, count)
    if count > 1:
        return _run_launched(recipe, folder, count, is_resumed=is_resumed, command=command, say=say)
    with alone(recipe) as world:
        run(world, None, is_resumed=is_resumed)
    return 0


def _refuse_copy_of_ray(folder: Path) -> None:
    """An error where a run would be written into what Ray deletes after a job, and other machines do not see."""
    if _RAY_COPIES in folder.absolute().parts:
        raise ConfigError(
            f"--runs: {folder} lies in Ray's copy of the job's working directory, which the machines do not share and "
            "Ray deletes; give --runs a folder on a disk that all machines see: --runs /shared/runs"
        )


def _run_driving(recipe: Recipe, *, is_resumed: bool, check: Callable[[], None], run: RunRecipe) -> int:
    with groups_of(recipe) as groups:
        if not is_resumed:
            check()
        run(ALONE, None, is_resumed=is_resumed, groups=groups)
    return 0


@contextmanager
def groups_of(recipe: Recipe) -> Generator[Groups | None]:
    """The groups of a recipe, which are started when a stage needs them and end with this; None where it has none."""
    placement = recipe.settings.placement
    if placement.groups is None:
        yield None
        return
    from kedge.runtime.ray_groups import ray_groups

    refuse_groups(recipe)
    layout = layout_of(recipe)
    with ray_groups(
        layout, device=recipe.settings.device, timeout_s=placement.timeout, restarts=placement.restarts
    ) as groups:
        yield groups


def alone(recipe: Recipe) -> AbstractContextManager[World]:
    """The world of a single process, whose weights are sharded all the same where the recipe says so; a process that
    drives groups holds all of its own."""
    placement = recipe.settings.placement
    if placement.weights == "replicate" or placement.groups is not None:
        return nullcontext(ALONE)
    from kedge.runtime.processes import sharding_alone

    return sharding_alone(on_gpu=gpus_of(recipe.settings.device) is not None)


def has_begun(folder: Path) -> bool:
    """Whether there is a run to go on with. One that a contract has stopped is not: what starts it again by itself, as
    schedulers do, must not overrule the contract."""
    if not (folder / MANIFEST_NAME).exists():
        return False
    if status_of(folder) == "stopped":
        raise ContractStop(
            f"{folder}: a contract of the recipe has stopped this run, and nothing starts it again but --resume"
        )
    return True


def refuse_launch_from_script(recipe: Recipe) -> None:
    """A script cannot be started again as several processes: what it did before would be done several times."""
    if _count(recipe) > 1:
        raise ConfigError(
            "placement.processes: a script runs in one process; write the recipe into a file and use `kedge run`, or "
            "leave placement out"
        )


def _count(recipe: Recipe) -> int:
    placement = recipe.settings.placement
    if placement.processes == 1:
        return 1
    num_gpus = gpus_of(recipe.settings.device)
    return num_processes(placement, num_gpus=num_gpus, num_sampling=num_sampling(recipe))


def _run_joined(
    recipe: Recipe, folder: Path, place: Any, *, is_resumed: bool, check: Callable[[], None], run: RunRecipe
) -> int:
    from kedge.runtime.processes import joined

    placement, num_gpus = recipe.settings.placement, gpus_of(recipe.settings.device)
    if placement.processes not in ("auto", 1, place.size):
        raise ConfigError(
            f"placement.processes is {placement.processes}, and {place.size} processes were started; leave it out"
        )
    if num_gpus is not None and place.local_rank >= num_gpus:
        raise ConfigError(
            f"process {place.rank} is number {place.local_rank} on {socket.gethostname()}, where torch finds "
            f"{num_gpus} GPU(s): start at most one process a GPU, and let each see all GPUs of its machine (srun: "
            "--gpus-per-node and --gpu-bind=none, not --gpus-per-task); or set device: cpu"
        )
    is_restarted = int(os.environ.get(_RESTARTS, "0")) > 0
    device = None if num_gpus is None else f"cuda:{place.local_rank}"
    try:
        refuse_unsharded(recipe, place.size)
        with joined(place, on_gpu=num_gpus is not None, timeout_s=placement.timeout) as world:
            world.write_stacks_to(folder / "stacks")
            if placement.weights == "shard":
                world.shard_weights(placement.shard_within)
            has_run = is_restarted and once(world, (folder / MANIFEST_NAME).exists)
            if not (is_resumed or has_run):
                once(world, check)
            run(world, device, is_resumed=is_resumed or has_run)
            world.gather(None)  # nobody leaves before all are done
    except BaseException as error:
        if place.rank == 0 and not (isinstance(error, ProcessLost) and _is_launched()):
            raise
        return _exit_quietly(error)
    return 0


def _exit_quietly(error: BaseException) -> int:
    """Process 0 speaks for all; what another one says goes to the launcher, or to the log of its own."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, KedgeError):
        if _is_launched() and not isinstance(error, ProcessLost):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _is_launched() -> bool:
    from kedge.runtime.launch import LAUNCHED

    return LAUNCHED in os.environ


def _run_launched(
    recipe: Recipe, folder: Path, count: int, *, is_resumed: bool, command: Sequence[str], say: Callable[[str], None]
) -> int:
    """Start the processes, and again after one was lost, as often as the recipe allows."""
    from kedge.runtime.launch import run_processes

    restarts = recipe.settings.placement.restarts
    for attempt in range(restarts + 1):
        resume = ["--resume"] if is_resumed else []
        ending = run_processes([*command, *resume], count, attempt=attempt)
        if ending.lost is None:
            if ending.last_words:
                print(ending.last_words, file=sys.stderr)
            return ending.code
        is_last = attempt == restarts or ending.is_asked
        what = f"{ending.lost}, and the other processes were stopped"
        then = "--resume goes on" if is_last else f"restart {attempt + 1} of {restarts}"
        _note_lost(folder, f"{what}: {then}", ending.lost, is_last=is_last, attempt=attempt)
        if is_last:
            words = f"; its last words: {ending.lost.last_words}" if ending.lost.last_words else ""
            raise RunError(f"{folder}: {what}{words}. --resume goes on from the last checkpoint")
        say(f"{what}: {then}, from the last checkpoint")
    raise AssertionError("the last attempt returns or raises")


def _note_lost(folder: Path, message: str, lost: Any, *, is_last: bool, attempt: int) -> None:
    if not (folder / MANIFEST_NAME).exists():
        return
    with Run.open(folder, for_writing=True) as run:
        run.event(
            "fatal" if is_last else "warning",
            "process.lost",
            message,
            rank=lost.rank,
            host=socket.gethostname(),
            signal=lost.signal,
            last_words=lost.last_words,
            restarts=attempt,
        )
        if is_last:
            run.finish("failed")
