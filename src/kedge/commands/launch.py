"""`kedge launch`: the file from which a cluster starts a recipe, checked before it is written; submitted if asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML, YAMLError

from kedge.commands.checks.groups import refuse_layout
from kedge.commands.checks.machine import num_sampling
from kedge.commands.checks.sharding import refuse_unsharded
from kedge.core.errors import ConfigError, RunError
from kedge.core.files import refuse_overwriting, write_text
from kedge.core.quoting import one_line, quoted
from kedge.launch import checks, sbatch
from kedge.launch.render import render, shipped_template
from kedge.launch.settings import Job, Kind, KubernetesJob, SlurmJob
from kedge.recipe.schema import Recipe, load_recipe
from kedge.recipe.wiring import connect

STDOUT = "-"
_SUBMIT = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "create", "-f")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What both kinds of cluster are told."""

    recipe: Path
    overrides: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    processes_per_node: int | None
    notice_s: int
    template: Path | None
    to: str | None
    """The file to write; `-` for the screen."""
    force: bool
    submit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The finished file, and where it lies; nowhere where it is for the screen."""

    text: str
    file: Path | None
    said: str = ""
    """What the scheduler answered."""


def launch_slurm(
    asked: Asked,
    *,
    runs: Path,
    time: str | None,
    account: str | None,
    partition: str | None,
    options: Sequence[str],
    python: str | None,
    image: str | None,
) -> Written:
    """Write the sbatch file of a recipe."""
    recipe = _loaded(asked)
    if image is not None and python is not None:
        raise ConfigError("--image and --python: a container has an interpreter of its own; give one of the two")
    if python is not None and (not python or python.startswith("-")):
        raise ConfigError(f"--python: the path of an interpreter, found {quoted(python)}")
    if image is not None and recipe.settings.placement.groups:
        raise ConfigError("--image: with placement.groups the driver runs outside of containers; use --python")
    folder, place = os.getcwd(), str(runs.absolute() if image else runs)
    if image is not None:
        checks.checked_image(image)
        checks.refuse_mounts(folder, place)
    slurm = SlurmJob(
        job=_job(asked, recipe, recipe_place=str(asked.recipe), runs=place),
        folder=folder,
        time=checks.checked_time(time, asked.notice_s) if time is not None else None,
        account=checks.checked_option("--account", account) if account is not None else None,
        partition=checks.checked_option("--partition", partition) if partition is not None else None,
        options=checks.checked_options(options),
        python=python,
        image=image,
    )
    _refuse_odd(asked, {"the folder": folder, "--runs": place, "--python": python})
    text = render(slurm, asked.template)
    if problems := [f"line {line}: {problem}" for line, problem in sbatch.problems(text)]:
        raise ConfigError(f"{asked.template or 'the template'}: {'; '.join(problems)}")
    return _write(asked, text, f"{slurm.job.name}.sbatch", "slurm")


def launch_kubernetes(
    asked: Asked,
    *,
    kind: Kind | None,
    at: str | None,
    runs: str | None,
    image: str | None,
    namespace: str | None,
    name: str | None,
    volumes: Sequence[str],
) -> Written:
    """Write the manifest of a recipe; `at` is where pods find it."""
    recipe = _loaded(asked)
    place = at if at is not None else str(asked.recipe.absolute())
    folder = str(PurePosixPath(place).parent)
    run_place = runs if runs is not None else str(PurePosixPath(folder) / "runs")
    mounted = checks.checked_volumes(volumes)
    job = KubernetesJob(
        job=_job(asked, recipe, recipe_place=place, runs=run_place),
        kind=_kind(kind, has_groups=recipe.settings.placement.groups is not None),
        object_name=checks.object_name(recipe.settings.name, name),
        image=checks.checked_image(image),
        namespace=checks.checked_namespace(namespace),
        volumes=mounted,
        folder=folder,
    )
    checks.refuse_unshared(place, "where the recipe lies", mounted, flag="--at")
    checks.refuse_folder(place, mounted, file=asked.recipe.name)
    checks.refuse_unshared(run_place, "where runs are written", mounted, flag="--runs")
    _refuse_odd(asked, {"--at": place, "--runs": run_place, "--volume": " ".join(volumes)})
    if job.kind == "rayjob":
        checks.refuse_two_shells(job.job.arguments)
    text = render(job, asked.template)
    _refuse_broken_yaml(text, asked.template)
    return _write(asked, text, f"{job.object_name}.{job.kind}.yaml", "kubernetes")


def write_template(kind: Kind, to: str, *, force: bool) -> Written:
    """The shipped template of a kind, to be edited and given to --template."""
    text = shipped_template(kind)
    if to == STDOUT:
        return Written(text=text, file=None)
    refuse_overwriting([Path(to)], force=force)
    write_text(Path(to), text)
    return Written(text=text, file=Path(to))


def _loaded(asked: Asked) -> Recipe:
    """The recipe with every key and connection checked."""
    recipe = load_recipe(asked.recipe, asked.overrides)
    connect(recipe)
    return recipe


def _job(asked: Asked, recipe: Recipe, *, recipe_place: str, runs: str) -> Job:
    settings = recipe.settings
    groups = settings.placement.groups
    job = Job(
        name=settings.name,
        recipe=recipe_place,
        runs=runs,
        overrides=asked.overrides,
        nodes=asked.nodes,
        gpus_per_node=asked.gpus_per_node,
        processes_per_node=checks.processes_per_node(
            asked.processes_per_node,
            nodes=asked.nodes,
            gpus_per_node=asked.gpus_per_node,
            num_sampling=num_sampling(recipe),
            has_groups=groups is not None,
            device=settings.device,
        ),
        restarts=settings.placement.restarts,
        notice_s=asked.notice_s,
        has_groups=groups is not None,
    )
    checks.refuse_contradictions(job, settings.placement.processes)
    refuse_unsharded(recipe, job.nodes * job.processes_per_node, undone="written")
    refuse_layout(recipe, undone="written")
    if groups is not None and settings.device != "cpu":
        num_gpus = sum(group.gpus for group in groups.values())
        checks.refuse_large_groups(num_gpus, nodes=asked.nodes, gpus_per_node=asked.gpus_per_node)
    return job


def _kind(kind: Kind | None, *, has_groups: bool) -> Kind:
    if kind is None:
        return "rayjob" if has_groups else "jobset"
    if (kind == "rayjob") != has_groups:
        which = "placement.groups needs Ray: --kind rayjob" if has_groups else "a RayJob is for placement.groups"
        raise ConfigError(f"--kind {kind}: {which}; leave --kind out")
    return kind


def _refuse_odd(asked: Asked, values: Mapping[str, str | None]) -> None:
    """Values with hidden characters, and, for a template of the user's, those with characters of shells."""
    all_values = {"the recipe's path": str(asked.recipe), **values}
    all_values |= {f"--set ({number})": override for number, override in enumerate(asked.overrides, start=1)}
    checks.refuse_hidden(all_values)
    if asked.template is not None:
        checks.refuse_shell(all_values, str(asked.template))


def _refuse_broken_yaml(text: str, template: Path | None) -> None:
    label = template or "the template"
    try:
        documents: list[Any] = list(YAML(typ="safe", pure=True).load_all(text))
    except YAMLError as error:
        raise ConfigError(f"{label}: what it makes is no YAML: {one_line(str(error), 300)}") from error
    for document in documents:
        is_object = isinstance(document, Mapping) and {"apiVersion", "kind", "metadata"} <= {*document}
        if not is_object:
            raise ConfigError(
                f"{label}: what it makes is no Kubernetes object: apiVersion, kind and metadata are needed"
            )


def _write(asked: Asked, text: str, default: str, cluster: str) -> Written:
    target = asked.to if asked.to is not None else default
    if asked.submit and target == STDOUT:
        raise ConfigError("--submit: there is a file to submit only where one is written; leave out --to -")
    program, *arguments = _SUBMIT[cluster]
    found = shutil.which(program)
    if asked.submit and found is None:
        raise ConfigError(
            f"--submit: there is no {program} on PATH here; write the file without --submit, and submit it where there "
            "is one"
        )
    if target == STDOUT:
        return Written(text=text, file=None)
    file = Path(target)
    inputs = [asked.recipe, *([asked.template] if asked.template else [])]
    refuse_overwriting([file], inputs=inputs, force=asked.force)
    write_text(file, text)
    if not asked.submit or found is None:
        return Written(text=text, file=file)
    done = subprocess.run([found, *arguments, str(file.absolute())], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"{program} refused {file} (exit {done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
        )
    return Written(text=text, file=file, said=done.stdout.strip())
