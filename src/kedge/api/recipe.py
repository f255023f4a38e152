"""A recipe in a script: from a file or a dict, changed, checked and run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from kedge.api.inputs import Inputs, recipe_values
from kedge.api.run import Run
from kedge.core.errors import ConfigError
from kedge.core.findings import Finding
from kedge.core.protocols import Metrics
from kedge.recipe import schema
from kedge.recipe.layers import Overrides

OnStep = Callable[..., Any]
"""`on_step(step, metrics)`, or `on_step(step, metrics, stage)`; a true value stops the run after saving."""
Say = Callable[[str], None]
Folder = str | os.PathLike[str]


class Recipe:
    """A pipeline of stages whose every setting has been checked.

    `Recipe({...})` takes what a YAML file would hold, with relative paths from the working folder; where a stage wants
    a reward or data, it may be a function or rows (`kedge.PPO` says more). `sets` changes settings by dotted key:
    `{"seed": 8}`, or texts as the command line takes them: `["stages.ppo.kl.target=6"]`.
    """

    def __init__(self, values: Mapping[str, Any], *, sets: Overrides = ()) -> None:
        self._inputs = Inputs()
        self._recipe = schema.recipe_of(recipe_values(values, self._inputs), sets)

    @classmethod
    def load(cls, path: Folder, *, sets: Overrides = ()) -> Self:
        """The recipe in a YAML file."""
        return cls.of(schema.load_recipe(Path(path), sets), Inputs())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, sets: Overrides = ()) -> Self:
        """The same as `Recipe(values)`."""
        return cls(values, sets=sets)

    @classmethod
    def of(cls, recipe: schema.Recipe, inputs: Inputs) -> Self:
        """A recipe that has been checked, with the rows that it reads."""
        made = cls.__new__(cls)
        made._recipe, made._inputs = recipe, inputs
        return made

    @property
    def name(self) -> str:
        return self._recipe.settings.name

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(self._recipe.stages)

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, as plain values."""
        return self._recipe.resolved()

    def check(self, *, offline: bool = False) -> list[Finding]:
        """What `kedge check` finds in the recipe, its data and its models. A fatal finding would keep it from running.

        Each finding has a `level` (info, warning, fatal), a `code`, a `message`, and often a `fix`. `offline` asks no
        reward server.
        """
        from kedge.commands.check import check_recipe

        with self._in_place() as (recipe, place):
            findings = check_recipe(recipe, offline=offline).findings
        return [
            replace(finding, message=_without(finding.message, place), where=_without(finding.where, place))
            for finding in findings
        ]

    def run(
        self,
        folder: Folder | None = None,
        *,
        on_step: OnStep | None = None,
        resume: bool = False,
        check: bool = True,
        say: Say | None = print,
    ) -> Run:
        """Run every stage that is not done yet, in `folder` (without one, in runs/NAME).

        `on_step(step, metrics)` is called with every step after it was written; a third parameter `stage` is given
        the name of the stage. Where it returns a true value, the run is saved and stops after that step, with status
        `interrupted`: `resume=True` goes on with it. A recipe that is not fit to run is refused, unless `check` is
        False. `say` is given a line now and then; None is quiet.
        """
        from kedge.commands.run import alone, refuse_launch_from_script
        from kedge.recipe.runner import run_in

        refuse_launch_from_script(self._recipe)
        home = Path(folder) if folder is not None else Path("runs") / self.name
        if resume:
            self._inputs.refuse_changed(home)
        elif check:
            self._refuse_unfit(home)
        callback = _Callback(on_step)
        try:
            with alone(self._recipe) as world:
                run_in(
                    home,
                    self._inputs.bound(self._recipe, home),
                    is_resumed=resume,
                    say=say or (lambda _: None),
                    on_step=callback if on_step else None,
                    write_inputs=partial(self._inputs.write, home),
                    world=world,
                )
        except KeyboardInterrupt:
            if not callback.has_stopped:
                raise
        return Run(home)

    def __repr__(self) -> str:
        return f"<recipe {self.name!r}: {' → '.join(self.stages)}>"

    def _refuse_unfit(self, home: Path) -> None:
        from kedge.commands.check import refuse_unfit

        with self._in_place() as (recipe, place):
            try:
                refuse_unfit(recipe, runs=home)
            except ConfigError as error:
                raise ConfigError(_without(str(error), place)) from None

    @contextmanager
    def _in_place(self) -> Generator[tuple[schema.Recipe, str]]:
        """The recipe with its rows as files, which vanish afterwards, and the folder of these."""
        if not self._inputs.files:
            yield self._recipe, ""
            return
        with TemporaryDirectory(prefix="kedge-") as folder:
            self._inputs.write(Path(folder))
            yield self._inputs.bound(self._recipe, Path(folder)), folder


class _Callback:
    """Calls the script's function with each step as it wants to be called, and remembers whether it asked to stop."""

    def __init__(self, on_step: OnStep | None) -> None:
        self._on_step = on_step
        self._takes_stage = on_step is not None and _takes(on_step, "stage")
        self.has_stopped = False

    def __call__(self, stage: str, step: int, metrics: Metrics) -> bool:
        assert self._on_step is not None
        more = {"stage": stage} if self._takes_stage else {}
        wants_to_stop = bool(self._on_step(step, dict(metrics), **more))
        self.has_stopped = self.has_stopped or wants_to_stop
        return wants_to_stop


def _takes(function: OnStep, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return False


def _without(text: str, place: str) -> str:
    """The text without the folder in which the rows were only for a while."""
    return text.replace(f"{place}/", "") if place else text
