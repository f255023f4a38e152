"""`kedge plan --probe`: two real steps of every stage that learns, on this machine, beside what was reckoned.

The stages run as `kedge run` runs them, in a process of their own and a folder that is deleted at the end: what a stage
makes in two steps is what the next one starts from. Where the weights of a model are not here, random ones of its
shape are taken. Memory is the peak of the stage, as the event `run.memory` says it; time is that of the last
step, since the first one compiles and tries sizes of passes. A correction is the measured peak over what is reckoned of
the very same two steps, with passes of the size that the run chose.
Left out: stages that wait for people or servers, several processes, and stages that learn nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.files import is_alive, write_text
from kedge.plan.machines import Machine
from kedge.plan.plan import Correction, default_model, reckon
from kedge.plan.work import StageWork
from kedge.recipe.schema import Recipe, load_recipe
from kedge.recipe.wiring import connect

STEPS: Final = 2
_WAITING: Final = ("label", "tasks", "revise", "gate", "exam", "evaluate", "drift")
"""Kinds of stages that are not probed, nor what needs them."""
_HOME: Final = ".kedge-probe-"
_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_CHOSEN: Final = re.compile(
    r"(?:policy: )?passes of at most (?P<chosen>[\d,]+) tokens(?: \(.*tried (?:.*, )?(?P<tried>[\d,]+)\))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One stage: what was reckoned of it, what two steps took, and the plan with that."""

    stage: str
    planned_peak: int
    measured_peak: int
    corrected_peak: int
    planned_step_s: float
    measured_step_s: float
    pass_tokens: int | None
    correction: Correction
    problem: str = ""
    """Why there is no measurement."""


def probe_recipe(
    file: Path,
    overrides: Sequence[str],
    recipe: Recipe,
    works: Sequence[StageWork],
    machine: Machine,
    say: Callable[[str], None],
) -> list[Probed]:
    """Two steps of every stage that learns and can be run here, in the order of the recipe."""
    if recipe.settings.rounds is not None:
        raise ConfigError("--probe: a recipe with rounds is not probed; take its `rounds` out for that")
    names = probed_stages(recipe)
    learning = [work for work in works if work.holding is not None and work.name in names]
    if not learning:
        raise ConfigError(f"--probe: no stage of {file} learns from what is here already, so nothing can be measured")
    home = empty_home(Path.cwd())
    try:
        changes = [*overrides, *_shortened(recipe, names, home)]
        say(f"probe: {STEPS} steps of {', '.join(work.name for work in learning)}")
        _run_apart(file, changes, names, home / "run")
        return [_probed(work, machine, home / "run" / work.name) for work in learning]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def empty_home(place: Path) -> Path:
    """A folder named by this process, which git passes over, without those that killed probes have left."""
    for left in place.glob(f"{_HOME}*"):
        number = left.name.removeprefix(_HOME)
        if number.isdecimal() and not is_alive(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    home = place / f"{_HOME}{os.getpid()}"
    home.mkdir()
    write_text(home / ".gitignore", "*\n")  # one that is killed leaves gigabytes, which `git add` would take along
    return home


def probed_stages(recipe: Recipe) -> list[str]:
    """The stages that learn, and those that make what they read; without any that waits for somebody."""
    wiring = connect(recipe)
    kinds = {name: str(getattr(stage, "kind", "")) for name, stage in recipe.stages.items()}
    needs = {name: {link.stage for link in wiring.links[name] if link.stage} for name in wiring.order}
    possible: list[str] = []
    for name in wiring.order:
        if kinds[name] not in _WAITING and needs[name] <= set(possible):
            possible.append(name)
    wanted: set[str] = set()
    for name in reversed(possible):
        if hasattr(recipe.stages[name], "micro_batch") or name in wanted:
            wanted |= {name, *needs[name]}
    return [name for name in possible if name in wanted]


def _shortened(recipe: Recipe, names: Sequence[str], home: Path) -> Iterator[str]:
    """Overrides that end each stage after a few steps, without samples and checkpoints."""
    short = {"max_steps": STEPS, "samples": 0, "if_unfit": "go_on", "eval": None}
    for name in names:
        fields = type(recipe.stages[name]).model_fields
        for key, value in short.items():
            is_optional = value is not None or (key in fields and fields[key].default is None)
            if key in fields and is_optional:
                yield f"stages.{name}.{key}={json.dumps(value)}"
        if "checkpoints" in fields:
            yield f"stages.{name}.checkpoints.every=1000000"
    if (model := _random_weights(default_model(recipe), home)) is not None:
        yield f"model={json.dumps(str(model))}"


def _random_weights(model: str, home: Path) -> Path | None:
    """A folder with random weights of the shape of a model; None where its own can be had here."""
    from kedge.models.loading.config_file import described_at
    from kedge.models.loading.random_weights import write_random

    source = described_at(model)
    if any(_is_here(source, name) for name in _WEIGHTS):
        return None
    return write_random(str(source), home / "model")


def _is_here(source: Path | str, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(source, Path):
        return (source / name).is_file()
    return isinstance(try_to_load_from_cache(source, name), str)


def _run_apart(file: Path, overrides: Sequence[str], names: Sequence[str], folder: Path) -> None:
    """In a process of its own, which may run out of memory; what it has written says how far it came."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(str(file), list(overrides), list(names), str(folder)))
    process.start()
    process.join()


def end_with_parent() -> None:
    """End this process as soon as the one that waits for it is gone: of a probe that is killed nothing goes on."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _run(file: str, overrides: list[str], names: list[str], folder: str) -> None:
    """Run some stages of a recipe; a failure is written for the process that waits."""
    end_with_parent()
    from kedge.recipe.runner import run_in

    place = Path(folder)
    try:
        whole = load_recipe(Path(file), overrides)
        recipe = replace(
            whole,
            stages={name: whole.stages[name] for name in names},
            kinds={name: whole.kinds[name] for name in names},
        )
        run_in(place, recipe, is_resumed=False, say=lambda text: None)
    except BaseException as error:  # whatever it is, the plan must say something
        place.mkdir(parents=True, exist_ok=True)
        (place / "problem.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise SystemExit(1) from error


def _probed(work: StageWork, machine: Machine, folder: Path) -> Probed:
    planned, planned_time = reckon(work, machine, Correction())
    events, metrics = (_records(folder / f"{name}.jsonl") for name in ("events", "metrics"))
    peaks = [event["evidence"]["memory/peak_gib"] for event in events if event.get("code") == "run.memory"]
    seconds = [step_seconds(record) for record in metrics if "time/step" in record]
    if not peaks or not seconds:
        problem = folder.parent / "problem.txt"
        reason = problem.read_text(encoding="utf-8") if problem.exists() else "the process ended without a word"
        return _unmeasured(work, planned.peak, planned_time.step, reason)
    measured = int(peaks[-1] * 2**30)
    sizes = pass_sizes(events)
    first = replace(work, looked=list(work.looked)[: STEPS * work.minibatches], steps=STEPS)
    same, same_time = reckon(first, machine, sizes)
    found = replace(sizes, memory=measured / same.peak, time=seconds[-1] / same_time.step)
    corrected, _ = reckon(work, machine, found)
    return Probed(
        stage=work.name,
        planned_peak=planned.peak,
        measured_peak=measured,
        corrected_peak=max(measured, corrected.peak),
        planned_step_s=planned_time.step,
        measured_step_s=seconds[-1],
        pass_tokens=sizes.pass_tokens,
        correction=found,
    )


def _unmeasured(work: StageWork, peak: int, step_s: float, problem: str) -> Probed:
    return Probed(
        stage=work.name,
        planned_peak=peak,
        measured_peak=0,
        corrected_peak=peak,
        planned_step_s=step_s,
        measured_step_s=0.0,
        pass_tokens=None,
        correction=Correction(),
        problem=problem,
    )


def step_seconds(record: Mapping[str, Any]) -> float:
    """Of a step alone: the last one of a stage is followed by a look at what is held out.

    >>> step_seconds({"time/step": 17.5, "time/evaluate": 16.0, "time/update": 1.5})
    1.5
    """
    return float(record["time/step"]) - sum(float(record.get(f"time/{part}", 0.0)) for part in ("evaluate", "save"))


def pass_sizes(events: Sequence[Mapping[str, Any]]) -> Correction:
    """Tokens of a pass that the run chose, those of the policy where there are two learners, and the most it tried."""
    for event in events:
        match = _CHOSEN.match(str(event["message"])) if event.get("code") == "micro_batch.chosen" else None
        if match is not None:
            chosen, tried = (int((match[name] or "0").replace(",", "")) for name in ("chosen", "tried"))
            return Correction(pass_tokens=chosen, tried_tokens=tried)
    return Correction()


def _records(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
