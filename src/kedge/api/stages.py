"""The stages as classes: each makes a recipe of one stage, with the stage's own settings as keywords."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic.fields import FieldInfo

from kedge.api.inputs import Inputs, place_of, stage_values
from kedge.api.recipe import Folder, OnStep, Recipe, Say
from kedge.api.run import Run, StageRun
from kedge.core import plugins
from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Stage
from kedge.core.yaml.problems import unknown_key
from kedge.recipe.schema import LONGEST_NAME, RecipeSettings, recipe_of

Model = str | os.PathLike[str] | Run | StageRun

TOP: Final = tuple(name for name in RecipeSettings.model_fields if name not in ("kedge", "model", "rounds", "stages"))
"""Keys of a recipe's top that are keywords of every class: a stage alone has no rounds."""
_START: Final = ("from", "base")
"""What recipes call the model that a stage starts from; here it is `model`."""
_ABOUT_MODEL: Final = "The model to start from: an alias, a folder, a hub id, or a run or stage that made one."
_SHORT = (str, int, float, bool, type(None))


def _stage_of(kind: str) -> Stage:
    return plugins.find("stages", kind)


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The settings of a stage that are keywords. What it starts from is `model`, and its kind is the class."""
    fields = {info.alias or name: info for name, info in section.model_fields.items()}
    return {name: info for name, info in fields.items() if name not in ("kind", *_START)}


def _keywords(section: type[Section]) -> dict[str, FieldInfo]:
    """All keywords but `model`: the settings of the stage, and those of the whole recipe."""
    return {**_keys(section), **{name: RecipeSettings.model_fields[name] for name in TOP}}


def _shown_default(info: FieldInfo) -> Any:
    """The default of a keyword in a signature; that of a whole section is too long to be shown."""
    if info is RecipeSettings.model_fields["name"]:
        return None  # the name of the folder
    if info.is_required():
        return inspect.Parameter.empty
    return info.default if isinstance(info.default, _SHORT) else ...


def _unknown(key: str, section: type[Section]) -> str:
    if key in _START:
        return f"{key}: not a keyword here; what the stage starts from is `model`"
    return f"{key}: {unknown_key(key, ['model', *_keywords(section)])}"


def _name_of(folder: Folder, kind: str) -> str:
    """A run's name from its folder: what trackers and reports call it.

    >>> _name_of("runs/my run.2", "ppo")
    'my-run-2'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(folder).name)[:LONGEST_NAME].strip("-") or kind


class OneStage:
    """A recipe of one stage, whose settings were checked when it was made."""

    kind: ClassVar[str]

    def __init__(self, model: Model | None = None, **settings: Any) -> None:
        stage = _stage_of(self.kind)
        top = {name: settings.pop(name) for name in TOP if name in settings}
        self._is_named = "name" in top
        own = {key: value for key, value in settings.items() if key in _keys(stage.settings)}
        self._inputs = Inputs()
        path = ("stages", self.kind)
        values = {"kind": self.kind, **stage_values(own, stage.settings, self._inputs, path=path)}
        start = self._start(model, values)
        self._recipe = recipe_of(
            {
                "kedge": 1,
                "name": self.kind,
                **({} if start is None else {"model": start}),
                **top,
                "stages": {self.kind: values},
            },
            label=type(self).__name__,
            root=path,
            noticed=[_unknown(key, stage.settings) for key in settings if key not in own],
        )

    def __init_subclass__(cls) -> None:
        """What `help` and editors show: the settings of the stage as keywords, with a line on each."""
        fields = _keywords(_stage_of(cls.kind).settings)
        listed = [f"{name}: {' '.join((info.description or '').split())}" for name, info in fields.items()]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", f"model: {_ABOUT_MODEL}", *listed])
        model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_shown_default(info))
            for name, info in fields.items()
        ]
        cls.__signature__ = inspect.Signature([model, *keywords])

    def recipe(self) -> Recipe:
        """The recipe that this is."""
        return Recipe.of(self._recipe, self._inputs)

    def check(self) -> list[Finding]:
        """What `kedge check` finds in the settings, the data and the model."""
        return self.recipe().check()

    def run(
        self,
        folder: Folder,
        *,
        on_step: OnStep | None = None,
        resume: bool = False,
        check: bool = True,
        say: Say | None = print,
    ) -> Run:
        """Run it in `folder`, where the stage has a folder of its own; `Recipe.run` has a word on every argument."""
        recipe = self._recipe
        if not self._is_named:
            recipe = replace(recipe, settings=recipe.settings.model_copy(update={"name": _name_of(folder, self.kind)}))
        made = Recipe.of(recipe, self._inputs)
        return made.run(folder, on_step=on_step, resume=resume, check=check, say=say)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} from {self._recipe.settings.model!r}>"

    def _start(self, model: Model | None, values: Mapping[str, Any]) -> Any:
        """The recipe's model. An evaluation has none of its own: its first one stands for it."""
        models: Any = values.get("models")
        return models[0] if model is None and isinstance(models, list) and models else place_of(model)


class SFT(OneStage):
    """Supervised fine-tuning on demonstrations; the loss is on the assistant's tokens only."""

    kind = "sft"


class Reward(OneStage):
    """A reward model, or an ensemble of them, from preferences, with a report on how far to trust it."""

    kind = "reward"


class Preference(OneStage):
    """DPO and its family, on preferences that are given, or made online from the policy's answers."""

    kind = "preference"


class Group(OneStage):
    """RL without a critic: GRPO, RLOO, REINFORCE++ and their relatives."""

    kind = "group"


class PPO(OneStage):
    """PPO with four roles: actor, critic, reward, reference.

    `reward` (and `gold`) may be a function `f(answer)` or `f(answers)`, a list of functions, whose sum it is, a source
    as a dict (`{"kind": "exact"}`), or a reward model by its folder, run or stage. `prompts` and other data may be a
    file, a list of dicts, a dataset of `datasets`; prompts may also be plain texts.
    """

    kind = "ppo"


class BestOfN(OneStage):
    """The best of N answers, imitated or distilled."""

    kind = "best_of_n"


class Evaluate(OneStage):
    """Answers of several models to the same prompts, scored and compared."""

    kind = "evaluate"
