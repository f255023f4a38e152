"""A recipe with rounds as one recipe a round: what `previous.X` is there, which stages are done once, what is kept.

A stage that depends on nothing of the round before, neither by itself nor through another stage, would give the same
again: it is done in round 1, and later rounds read what it made there. All others are done in every round.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, cast

from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.quoting import quoted
from kedge.core.seeds import seed_for
from kedge.core.stage import Stage
from kedge.core.suggest import did_you_mean
from kedge.core.yaml.source import KeyPath, Tree
from kedge.recipe.data_inputs import ROUND_WEIGHT
from kedge.recipe.round_rules import weight_of_age
from kedge.recipe.round_settings import RoundsSettings
from kedge.recipe.schema import Made, Recipe, RoundPlace, recipe_in
from kedge.recipe.wiring import PREVIOUS, Link, Plan, connect, inputs_of

DRIFT: Final = "drift"
"""The stage that every round ends with, and its kind."""
_RESERVED: Final = re.compile(r"previous|round-\d+|drift", re.IGNORECASE)
LABELS_OF: Final = "reward"
"""The kind of stage that learns from the labels of earlier rounds too."""


def folder_of(number: int) -> str:
    """
    >>> folder_of(2)
    'round-2'
    """
    return f"round-{number}"


@dataclass(frozen=True)
class Rounds:
    """A recipe with rounds, whose every name is known: `recipe(n)` is that of round n."""

    whole: Recipe

    @property
    def settings(self) -> RoundsSettings:
        settings = self.whole.settings.rounds
        assert settings is not None
        return settings

    @cached_property
    def plan(self) -> Plan:
        return connect(self.whole)

    @cached_property
    def first(self) -> Recipe:
        """Round 1, where `previous.X` is what `first` says."""
        tree = _in_round_1(self.whole)
        try:
            recipe = recipe_in(tree, self.whole.file)
        except ConfigError as error:
            begun = [f"previous.{name} is {value or 'null'}" for name, value in self.settings.first.items()]
            raise ConfigError(f"{error}\n  (in round 1, where {' and '.join(begun)}: rounds.first)") from None
        return replace(recipe, settings=self._settings(1))

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """The stages that every round does, in the order of the recipe."""
        again = {name for name, links in self.plan.links.items() if any(link.home for link in links)}
        while more := {
            name
            for name, links in self.plan.links.items()
            if name not in again and any(link.stage in again for link in links)
        }:
            again |= more
        return tuple(name for name in self.whole.stages if name in again)

    @cached_property
    def once(self) -> tuple[str, ...]:
        return tuple(name for name in self.whole.stages if name not in self.repeated)

    @cached_property
    def policy(self) -> str | None:
        """The stage whose model goes from round to round: the first of `first` that makes one."""
        return self._carried("model")

    @cached_property
    def reward(self) -> str | None:
        """The stage whose reward model rounds are compared by: one of `first`, else the one that the policy asks."""
        if carried := self._carried("reward_model"):
            return carried
        links = self.plan.links[self.policy] if self.policy else ()
        return next((link.stage for link in links if link.stage and "reward_model" in link.kinds), None)

    def recipe(self, number: int, previous: str | None = None) -> Recipe:
        """Round `number`; `previous` is the hash of the manifest of the one before."""
        recipe = self.first if number == 1 else replace(self.whole, settings=self._settings(number))
        place = RoundPlace(
            number=number,
            first_seed=self.first.settings.seed,
            previous=previous,
            made=self._made(number),
            kept=self._kept(number),
            held_out=self._held_out(number),
        )
        return self._with_drift(replace(self._weighted(recipe, place), round=place))

    def round_of(self, link: Link, number: int) -> int:
        """The round that has made what a link of round `number` reads."""
        return int(link.home.split("/")[1].removeprefix("round-")) if link.home else number

    def _carried(self, kind: str) -> str | None:
        carried = (name for name in self.settings.first if next(iter(self.whole.kinds[name].makes.values())) == kind)
        return next(carried, None)

    def _settings(self, number: int) -> Any:
        seed = seed_for(self.whole.settings.seed, "round", number)
        return self.whole.settings.model_copy(update={"rounds": None, "seed": seed})

    def _made(self, number: int) -> dict[str, Made]:
        """What a round finds made, by the names that inputs may have."""
        if number == 1:
            return {}
        made: dict[str, Made] = {}
        for stage in self.whole.stages:
            is_once = stage in self.once
            if is_once:
                made[stage] = Made(stage=stage, folder=f"../{folder_of(1)}/{stage}")
            for earlier in range(1, number):
                folder = f"../{folder_of(1 if is_once else earlier)}/{stage}"
                made[f"{folder_of(earlier)}.{stage}"] = Made(stage=stage, folder=folder)
            made[f"{PREVIOUS}.{stage}"] = made[f"{folder_of(number - 1)}.{stage}"]
        return made

    def labelled(self) -> list[str]:
        """The stages that learn from labels which every round makes anew."""
        return [
            name
            for name in self.repeated
            if getattr(self.whole.stages[name], "kind", "") == LABELS_OF
            and any(link.field == "data" and link.stage in self.repeated for link in self.plan.links[name])
        ]

    def _kept(self, number: int) -> dict[str, tuple[tuple[str, float], ...]]:
        keep = self.settings.keep
        if keep.pairs == "none":
            return {}
        kept = tuple(
            (folder_of(earlier), weight_of_age(number - earlier, keep.weight_halves_after))
            for earlier in range(1, number)
        )
        return dict.fromkeys(self.labelled(), kept) if kept else {}

    def _held_out(self, number: int) -> dict[str, tuple[str, ...]]:
        earlier = tuple(folder_of(before) for before in range(1, number))
        return dict.fromkeys(self.labelled(), earlier) if earlier else {}

    def _weighted(self, recipe: Recipe, place: RoundPlace) -> Recipe:
        """Where labels of earlier rounds count less, the stages that read them are told by which field."""
        weighed = [name for name, kept in place.kept.items() if any(weight != 1.0 for _, weight in kept)]
        if not weighed:
            return recipe
        changed = {name: recipe.stages[name].model_copy(update={"weights": ROUND_WEIGHT}) for name in weighed}
        return replace(recipe, stages={**recipe.stages, **changed})

    def _with_drift(self, recipe: Recipe) -> Recipe:
        """With the stage that compares the round with those before; ahead of gates, which may end it."""
        assert recipe.round is not None
        kind: Stage = plugins.find("stages", DRIFT)
        values, places = _drift_values(self, recipe.round.number)
        section = kind.settings.model_validate(values)
        gates = [name for name, stage in recipe.stages.items() if getattr(stage, "kind", "") == "gate"]
        ahead = {name: stage for name, stage in recipe.stages.items() if name not in gates}
        stages = {**ahead, DRIFT: section, **{name: recipe.stages[name] for name in gates}}
        tree = replace(recipe.tree, places={**recipe.tree.places, **places})
        return replace(recipe, stages=stages, kinds={**recipe.kinds, DRIFT: kind}, tree=tree)


def rounds_of(recipe: Recipe) -> Rounds:
    """The rounds of a recipe; an error that names everything that is wrong with them."""
    rounds = Rounds(recipe)
    if faults := list(_faults(rounds)):
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigError(f"{recipe.file}: the rounds cannot run:\n{listed}")
    connect(rounds.recipe(1))
    connect(rounds.recipe(2))
    return rounds


def _faults(rounds: Rounds) -> Iterator[str]:
    recipe, first = rounds.whole, rounds.settings.first
    tree = recipe.tree
    for name in recipe.stages:
        if _RESERVED.fullmatch(name):
            yield _at(tree, ("stages", name), f"a recipe with rounds uses {quoted(name)} itself; rename the stage")
    for name, value in first.items():
        where = ("rounds", "first", name)
        if name not in recipe.stages:
            hint = did_you_mean(name, recipe.stages)
            yield _at(tree, where, f"there is no stage of that name{hint}; there are {', '.join(recipe.stages)}")
        if value is not None and value.partition(".")[0] == PREVIOUS:
            yield _at(tree, where, f"in round 1 there is no round before, found {quoted(value)}; name a stage or null")
    if any(name not in recipe.stages for name in first):
        return
    used = dict[str, str]()
    for name, links in rounds.plan.links.items():
        used.update({link.stage: f"{name}.{link.field}" for link in links if link.home})
    for stage, user in used.items():
        if stage not in first:
            what = f"{user} reads previous.{stage}: say what that is in round 1, a stage, a file, or null"
            yield _at(tree, ("rounds", "first"), f"has no {stage}, and {what}")
    if not used:
        some = next(iter(first))
        yield _at(tree, ("rounds",), f"no stage reads what the round before made (previous.{some}): all would be equal")
    if rounds.settings.keep.weight_halves_after is not None:
        for name in rounds.labelled():
            if getattr(recipe.stages[name], "weights", None) is not None:
                yield f"{name}.weights: rounds.keep.weight_halves_after sets what labels weigh; leave one of them out"


def _at(tree: Tree, path: KeyPath, text: str) -> str:
    return tree.problem(path, text)[1]


def _in_round_1(recipe: Recipe) -> Tree:
    """The values of a recipe with `previous.X` replaced by what `first` says, wherever an input names it."""
    rounds = recipe.settings.rounds
    assert rounds is not None
    values = deepcopy(recipe.tree.values)
    values.pop("rounds", None)
    for name, settings in recipe.stages.items():
        for path, _, _ in inputs_of(settings):
            _replace(values["stages"][name], path, _First(rounds.first, recipe.stages))
    return replace(recipe.tree, values=values)


@dataclass(frozen=True, slots=True)
class _First:
    """What stages of the round before are in round 1, and which names are stages."""

    values: Mapping[str, str | None]
    stages: Container[str]

    def of(self, value: str) -> str | None:
        """What an input names in round 1; an output is asked of a stage, a file has none."""
        stage = value.split(".")[1] if value.startswith(f"{PREVIOUS}.") else ""
        if stage not in self.values:
            return value
        begun, output = self.values[stage], value.split(".")[2:]
        return ".".join([begun, *output]) if begun is not None and begun in self.stages else begun


def _replace(values: Any, path: Sequence[str], first: _First) -> None:
    """Put what `first` says into the values at `path`, where they name the round before; defaults are not written."""
    *above, last = path
    for key in above:
        values = cast("dict[str, Any]", values).get(key) if isinstance(values, dict) else None
    if not isinstance(values, dict) or last not in values:
        return
    section = cast("dict[str, Any]", values)
    section[last] = _in_first(section[last], first)


def _in_first(value: Any, first: _First) -> Any:
    """One value of an input in round 1. Of a list, what is nothing is left out, and what is there twice.

    >>> first = _First({"ppo": "sft", "reward": None, "label": "pairs.jsonl"}, ("sft", "ppo", "reward", "label"))
    >>> _in_first("previous.ppo", first), _in_first("previous.ppo.model", first), _in_first("previous.reward", first)
    ('sft', 'sft.model', None)
    >>> _in_first(["sft", "previous.ppo", "ppo"], first), _in_first({"file": "previous.label.pairs"}, first)
    (['sft', 'ppo'], {'file': 'pairs.jsonl'})
    """
    if isinstance(value, str):
        return first.of(value)
    if isinstance(value, list):
        parts = [_in_first(part, first) for part in cast("list[Any]", value)]
        return [part for place, part in enumerate(parts) if part is not None and part not in parts[:place]]
    if isinstance(value, dict) and "file" in value:
        fields = cast("dict[str, Any]", value)
        file = _in_first(fields["file"], first)
        return None if file is None else {**fields, "file": file}
    return value


def _drift_values(rounds: Rounds, number: int) -> tuple[dict[str, Any], dict[KeyPath, Any]]:
    """The settings of the stage that compares a round with those before, and where its paths start."""
    whole, settings, first = rounds.whole, rounds.settings, rounds.settings.first
    values: dict[str, Any] = {"kind": DRIFT, "answer_seed": whole.settings.seed, "count": settings.drift.number}
    places: dict[KeyPath, Any] = {}

    def put(field: str, value: Any, written_at: KeyPath | None = None) -> None:
        values[field] = value
        if written_at is not None:
            places["stages", DRIFT, field] = whole.tree.place(written_at)

    def before(stage: str) -> str | None:
        return first.get(stage) if number == 1 else f"{PREVIOUS}.{stage}"

    if policy := rounds.policy:
        put("policy", policy)
        put("previous", before(policy), ("rounds", "first", policy))
        begun = first[policy]
        is_stage = begun is not None and begun.partition(".")[0] in whole.stages
        put("first", f"{folder_of(1)}.{begun}" if is_stage and number > 1 else begun, ("rounds", "first", policy))
        _put_questions(rounds, policy, put)
    if reward := rounds.reward:
        put("reward", reward)
        put("previous_reward", before(reward), ("rounds", "first", reward))
        _put_labels(rounds, reward, number, put)
    if settings.drift.anchor is not None:
        put("anchor", settings.drift.anchor, ("rounds", "drift", "anchor"))
    return values, places


def _put_questions(rounds: Rounds, policy: str, put: Any) -> None:
    """What the policies are asked and how, and who knows what is good: as in the evaluation of the policy, else as it
    was trained."""
    whole = rounds.whole
    evaluation = next(
        (
            name
            for name, stage in whole.stages.items()
            if getattr(stage, "kind", "") == "evaluate"
            and any(link.stage == policy and not link.home for link in rounds.plan.links[name])
        ),
        None,
    )
    prompts = rounds.settings.drift.prompts
    if prompts is not None:
        put("prompts", prompts, ("rounds", "drift", "prompts"))
    names = [name for name in (evaluation, policy) if name is not None]
    stage = whole.stages[names[0]]
    if prompts is None:
        put("prompts", stage.model_dump(mode="json", by_alias=True).get("prompts"), ("stages", names[0], "prompts"))
    sampling = getattr(stage, "sampling", stage)
    for field in ("max_new_tokens", "temperature", "top_p", "top_k"):
        put(field, getattr(sampling, field))
    put("max_prompt_tokens", getattr(stage, "max_prompt_tokens", None))
    put("too_long", getattr(stage, "too_long", "refuse"))
    golds = [gold for name in names if (gold := getattr(whole.stages[name], "gold", None)) is not None]
    if golds:
        put("gold", golds[0])


def _put_labels(rounds: Rounds, reward: str, number: int, put: Any) -> None:
    """The held-out labels of every round so far, and those of round 1 as the set that reward models are compared on."""
    links = [link for link in rounds.plan.links[reward] if link.field == "heldout"]
    if len(links) != 1:
        return  # one share of the data, which no file holds, or several objectives
    (link,) = links
    written_at: KeyPath = ("stages", reward, "heldout")
    if link.stage not in rounds.repeated:
        put("heldout", [link.value], written_at)
        put("anchor", link.value, written_at)
        return
    earlier = [f"{folder_of(before)}.{link.value}" for before in range(1, number)]
    put("heldout", [*earlier, link.value])
    put("anchor", earlier[0] if earlier else link.value)
