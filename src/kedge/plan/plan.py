"""The plan of a recipe: memory, time, energy and money of its stages, and of other ways to hold their models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from kedge.models.loading.config_file import config_values
from kedge.plan.duration import LOAD_SHARE, StageTime, stage_time
from kedge.plan.holding import Holding
from kedge.plan.lengths import DataReader
from kedge.plan.machines import CARDS, UNKNOWN_CARD, Machine
from kedge.plan.memory import StageMemory, stage_memory
from kedge.plan.shapes import ModelShape, shape_of
from kedge.plan.ways import Changes, changes_to, merged, ways_of
from kedge.plan.work import StageWork, work_of
from kedge.recipe.placement import PlacementSettings
from kedge.recipe.rounds import rounds_of
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, connect
from kedge.recipe.wiring import Plan as Wiring

WORTH_IT: Final = 0.95
"""Another way is proposed to a stage that fits if it takes at most this share of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a stage or a whole recipe."""

    seconds: float
    kwh: float
    money: float | None
    """US dollars of GPUs; None without a price."""
    labels: float = 0.0
    label_money: float | None = None
    """US dollars of labels; None without a price for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a probe found of a stage: factors on what is reckoned, the size of its passes, and the largest that it
    tried."""

    memory: float = 1.0
    time: float = 1.0
    pass_tokens: int | None = None
    tried_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WayPlan:
    """One way of holding a stage's models."""

    name: str
    holding: Holding
    peak: int
    fits: bool
    step_s: float
    cost: Cost
    is_own: bool
    changes: Changes | None
    """What has to change in the recipe for it; None where this version has no such settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    name: str
    kind: str
    model: str
    memory: StageMemory
    fits: bool
    time: StageTime
    steps: int
    tokens: float
    cost: Cost
    ways: tuple[WayPlan, ...]
    best: WayPlan | None
    """The way that is proposed; None where the stage stays as it is."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe will take on a machine."""

    name: str
    machine: Machine
    stages: tuple[StagePlan, ...]
    times: int
    """The rounds of a recipe; stages that depend on no round before are done in the first alone."""
    total: Cost
    peak: int
    fits: bool
    changes: Changes
    """Of all proposals together; empty where nothing is proposed."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: settings by their dotted paths."""
        return cast("dict[str, Any]", _plain(asdict(self)))


def plan_recipe(recipe: Recipe, machine: Machine) -> Plan:
    """The plan of a recipe on a machine: from its settings, the configurations of its models and its data."""
    return plan_works(recipe, works_of(recipe, machine), machine)


def works_of(recipe: Recipe, machine: Machine) -> list[StageWork]:
    """The work of every stage, in the order in which they are done; of a recipe with rounds, that of the first."""
    recipe = _first_round(recipe)
    wiring = connect(recipe)
    shapes = _Shapes(recipe, wiring)
    reader = DataReader(recipe=recipe, wiring=wiring, model_of=shapes.source)
    is_sharded = recipe.settings.placement.weights == "shard"
    shards = machine.gpus if is_sharded else 1
    return [
        work_of(name, recipe.stages[name], shapes.of(name), reader, shards=shards, reward_shape=shapes.of_reward(name))
        for name in wiring.order
    ]


def plan_works(
    recipe: Recipe,
    works: Sequence[StageWork],
    machine: Machine,
    corrections: Mapping[str, Correction] = MappingProxyType({}),
) -> Plan:
    """The plan of stages whose work is known; `corrections` are those of a probe, by stage."""
    stages = tuple(_stage_plan(recipe, work, machine, corrections.get(work.name, Correction())) for work in works)
    rounds = None if recipe.settings.rounds is None else rounds_of(recipe)
    times, once = (1, ()) if rounds is None else (rounds.settings.count, rounds.once)
    total = _sum([(stage.cost, 1 if stage.name in once else times) for stage in stages])
    proposed = [stage.best.changes for stage in stages if stage.best is not None and stage.best.changes]
    changes = merged(proposed)
    return Plan(
        name=recipe.settings.name,
        machine=machine,
        stages=stages,
        times=times,
        total=total,
        peak=max((stage.memory.peak for stage in stages), default=0),
        fits=all(stage.fits for stage in stages),
        changes=changes,
        notes=tuple(_notes(recipe, stages, machine)),
    )


def _first_round(recipe: Recipe) -> Recipe:
    return recipe if recipe.settings.rounds is None else rounds_of(recipe).recipe(1)


class _Shapes:
    """The shape of each stage's model: that of the model behind its chain of `from`."""

    def __init__(self, recipe: Recipe, wiring: Wiring) -> None:
        self._recipe, self._wiring = recipe, wiring
        self._known: dict[str, ModelShape] = {}

    def of(self, stage: str) -> ModelShape:
        """That of its model; of several that are looked at one after another, the largest."""
        return max(map(self._of_source, self._sources(stage)), key=lambda shape: shape.parameters)

    def of_reward(self, stage: str) -> ModelShape | None:
        """That of the reward model that a stage asks; None where it asks none, or one that says no shape."""
        for link in self._wiring.links.get(stage, ()):
            if "reward_model" not in link.kinds or link.field in ("from", "models"):
                continue
            if link.stage in self._wiring.links:
                return self.of(link.stage)
            if (Path(link.source()) / "config.json").is_file():
                return self._of_source(link.source())
        return None

    def _of_source(self, source: str) -> ModelShape:
        if source not in self._known:
            self._known[source] = shape_of(*config_values(source))
        return self._known[source]

    def source(self, stage: str) -> str:
        """The model that a stage begins with, whose tokenizer reads its data: a folder as it can be opened, an alias or
        an id of the hub."""
        return self._sources(stage)[0]

    def _sources(self, stage: str) -> list[str]:
        """The models behind its `from` or its `models`; that of the recipe where it names none."""
        found: list[str] = []
        for link in self._wiring.links.get(stage, ()):
            if link.field not in ("from", "models") or not {"model", "reward_model"} & set(link.kinds):
                continue
            if not link.stage:
                found.append(link.source())
            elif link.stage != stage and link.stage in self._wiring.links:
                found.append(self.source(link.stage))
        return found or [default_model(self._recipe)]


def default_model(recipe: Recipe) -> str:
    """The recipe's `model` as it can be opened: a folder is looked for from the file that names it."""
    folder = (recipe.tree.place(("model",)).file or recipe.file).parent
    return Link(field="from", kinds=("model",), value=recipe.settings.model, folder=folder).source()


def reckon(work: StageWork, machine: Machine, correction: Correction) -> tuple[StageMemory, StageTime]:
    """Memory and time of a stage, corrected."""
    memory = stage_memory(work, machine, pass_tokens=correction.pass_tokens, tried_tokens=correction.tried_tokens)
    time = stage_time(work, memory, machine)
    peak = round(correction.memory * memory.peak)
    is_room = memory.fits if correction.memory <= 1 else memory.fits and peak <= machine.memory
    whole = time.total + (correction.time - 1) * time.step * work.steps * work.members
    return replace(memory, peak=peak, fits=is_room), replace(time, step=correction.time * time.step, total=whole)


def _stage_plan(recipe: Recipe, work: StageWork, machine: Machine, correction: Correction) -> StagePlan:
    memory, time = reckon(work, machine, correction)
    others = ways_of(work, machine) if work.holding is not None else []
    ways = [_way_plan(recipe, work, way, machine, correction) for way in others]
    return StagePlan(
        name=work.name,
        kind=work.kind,
        model=work.shape.source,
        memory=memory,
        fits=memory.fits,
        time=time,
        steps=work.steps * work.members,
        tokens=work.tokens,
        cost=_cost(time.total, work.labels, machine),
        ways=tuple(ways),
        best=best_of(ways),
        notes=(*work.notes, *work.shape.notes),
    )


def _way_plan(recipe: Recipe, work: StageWork, way: Holding, machine: Machine, correction: Correction) -> WayPlan:
    assert work.holding is not None
    is_own = way == work.holding
    measured = correction if is_own else replace(correction, pass_tokens=None, tried_tokens=None)
    memory, time = reckon(replace(work, holding=way), machine, measured)
    return WayPlan(
        name=way.name(),
        holding=way,
        peak=memory.peak,
        fits=memory.fits,
        step_s=time.step,
        cost=_cost(time.total, work.labels, machine),
        is_own=is_own,
        changes=changes_to(way, work.holding, work.name, recipe.stages[work.name]),
    )


def best_of(ways: Sequence[WayPlan]) -> WayPlan | None:
    """The cheapest way that fits and can be chosen, where the stage's own does not fit. One that does is left alone,
    but for a faster way that learns the same; None where nothing is proposed."""
    own = next((way for way in ways if way.is_own), None)
    if own is None:
        return None
    fitting = [way for way in ways if way.fits and not way.is_own and way.changes is not None]
    if own.fits:
        fitting = [
            way
            for way in fitting
            if _learns_the_same(way.holding, own.holding) and way.cost.seconds <= WORTH_IT * own.cost.seconds
        ]
    return min(fitting, key=lambda way: (way.cost.seconds, len(way.changes or ())), default=None)


def _learns_the_same(way: Holding, own: Holding) -> bool:
    return (way.roles, way.base_bits, way.frozen_bits) == (own.roles, own.base_bits, own.frozen_bits)


def _cost(seconds: float, labels: float, machine: Machine) -> Cost:
    hours = seconds / 3600
    return Cost(
        seconds=seconds,
        kwh=hours * machine.gpus * machine.watts * LOAD_SHARE / 1000,
        money=None if machine.price is None else hours * machine.gpus * machine.price,
        labels=labels,
        label_money=None if machine.label_price is None else labels * machine.label_price,
    )


def _sum(costs: Sequence[tuple[Cost, int]]) -> Cost:
    """Of stages, each with how often it is done."""

    def added(numbers: Sequence[tuple[float | None, int]]) -> float | None:
        known = [times * number for number, times in numbers if number is not None]
        return sum(known) if known else None

    return Cost(
        seconds=sum(times * cost.seconds for cost, times in costs),
        kwh=sum(times * cost.kwh for cost, times in costs),
        money=added([(cost.money, times) for cost, times in costs]),
        labels=sum(times * cost.labels for cost, times in costs),
        label_money=added([(cost.label_money, times) for cost, times in costs]),
    )


def _notes(recipe: Recipe, stages: Sequence[StagePlan], machine: Machine) -> list[str]:
    notes = list(dict.fromkeys(note for stage in stages for note in stage.notes))
    if not machine.is_measured:
        like = "" if machine.name in CARDS else f", as if it were as fast as an {UNKNOWN_CARD.name}"
        notes.append(f"{machine.name} was not measured: times are those of an H200 scaled by data sheets{like}")
    if machine.kind == "cpu":
        notes[-1] = "times on a CPU are those of cores with AVX2 (docs/speed.md), and differ from machine to machine"
    notes += _placement_notes(recipe.settings.placement, machine)
    notes += _not_reckoned(recipe, stages)
    if any(stage.best and stage.best.holding.roles == "lora" for stage in stages):
        notes.append("adapters want about ten times the learning rate of full weights: look at optimiser.lr")
    return notes


def _placement_notes(placement: PlacementSettings, machine: Machine) -> Iterator[str]:
    """Where the recipe's processes are not those that are planned for."""
    gpus, processes = machine.gpus, placement.processes
    if placement.groups is not None:
        yield f"placement.groups is not reckoned: planned as if all roles shared {gpus} GPU{'s' * (gpus > 1)}"
    elif processes == 1 and gpus > 1:
        yield f"placement.processes is 1: {gpus} GPUs need placement: {{processes: auto}}"
    elif processes not in ("auto", gpus) and machine.kind == "cuda":
        yield f"placement.processes is {processes}: plan for as many GPUs, --gpus {processes}"
    if gpus > 1 and placement.weights == "replicate" and placement.groups is None:
        yield "placement.weights: replicate: every GPU holds all weights; `shard` divides them (rows `shard`)"


def _not_reckoned(recipe: Recipe, stages: Sequence[StagePlan]) -> Iterator[str]:
    """What takes time and memory of which nothing is known here."""
    for stage in stages:
        if stage.kind not in ("data", "label", "tasks") and not stage.memory.roles:
            yield f"{stage.name}: time and memory of kind {stage.kind} are not reckoned"
        generator = str(getattr(getattr(recipe.stages.get(stage.name), "generator", None), "kind", "local"))
        if generator != "local":
            yield f"{stage.name}: {generator} is not reckoned: planned as if generator: local sampled"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {".".join(key) if isinstance(key, tuple) else str(key): _plain(part) for key, part in items}
    if isinstance(value, frozenset | set):
        return sorted(cast("frozenset[str]", value))
    return [_plain(part) for part in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value
