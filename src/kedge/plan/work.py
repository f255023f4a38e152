"""What a stage does, in numbers: models that learn and that only read, rows of its steps, answers that it samples.

One function for each family of stages turns settings into a `StageWork`; memory, time and money are reckoned from that
alone. Left out: looks at the policy while it trains, samples, early stopping, rollbacks, dropped batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kedge.core.seeds import seed_for
from kedge.core.settings import Section
from kedge.plan.holding import Holding, Roles, holding_of
from kedge.plan.lengths import DataReader, Item, Row, num_steps
from kedge.plan.shapes import ModelShape

Step = list[Item]
Family = Literal["supervised", "reward", "rl", "sampling", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Answers that are drawn together, once or in each iteration."""

    answers: int
    prompt_tokens: float
    """Of a prompt, on average."""
    longest_prompt: int
    new_tokens: int
    rows: int | Literal["auto"]
    times: int
    """How often so many answers are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    name: str
    kind: str
    family: Family
    shape: ModelShape
    holding: Holding | None = None
    """None for a stage without a model that learns."""
    learners: tuple[str, ...] = ()
    """Roles that learn at the same time."""
    members: int = 1
    """Models that learn one after another, and are all held."""
    layers: int = 0
    """Blocks that learn."""
    reference: bool = False
    """Whether there is a reference; under `lora` and `trunk` it shares the policy's weights."""
    rewards: int = 0
    """Reward models that are held."""
    reward_shape: ModelShape | None = None
    """Of these; None where it is the policy's."""
    shared_reward: frozenset[Roles] = frozenset()
    """The ways under which they share the policy's base or trunk."""
    steps: int = 0
    """Optimiser steps; iterations of an RL stage."""
    updates: int = 1
    """Optimiser steps of a learner in one of them."""
    minibatches: int = 1
    """Optimiser steps that an iteration's rows are cut into."""
    looked: Sequence[Step] = ()
    """The items of the first optimiser steps."""
    batch_tokens: int = 0
    """Of all rows of an iteration, at most, which are judged."""
    has_average: bool = False
    """Whether a moving average of the policy's weights is kept, in float32."""
    has_logits: bool = True
    """Whether tokens are predicted: a reward model reads one number a row."""
    micro_batch: int | Literal["auto"] = "auto"
    sampling: Sampling | None = None
    reads: float = 0.0
    """Forward passes over all rows of an iteration besides learning: reference, old log-probs, values, scores."""
    saves: int = 1
    """Checkpoints."""
    labels: float = 0.0
    """Of people and judges."""
    is_compiled: bool = True
    notes: tuple[str, ...] = ()

    @property
    def mean_step(self) -> tuple[float, float, float]:
        """Of an optimiser step: tokens, predicted tokens, rows."""
        rows = [row for step in self.looked for item in step for row in item]
        count = max(1, len(self.looked))
        return sum(row.tokens for row in rows) / count, sum(row.counted for row in rows) / count, len(rows) / count

    @property
    def tokens(self) -> float:
        """That are learnt from and sampled in the whole stage."""
        drawn = self.sampling.answers * self.sampling.new_tokens * self.sampling.times if self.sampling else 0
        return self.mean_step[0] * self.steps * self.updates * self.members + drawn


def work_of(
    name: str,
    settings: Section,
    shape: ModelShape,
    reader: DataReader,
    *,
    shards: int,
    reward_shape: ModelShape | None = None,
) -> StageWork:
    """The work of one stage of a recipe. `reward_shape` is that of the reward model that it asks, if there is one."""
    work = _work_of_kind(name, settings, shape, reader, shards)
    if reward_shape is None or not work.rewards:
        return work
    more = reward_shape.layers * reward_shape.layer_weights / (shape.layers * shape.layer_weights) - 1
    reads = work.reads + work.rewards * more if work.family == "rl" else work.reads
    return replace(work, reward_shape=reward_shape, reads=reads)


def _work_of_kind(name: str, settings: Section, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    values: Any = settings
    match str(getattr(values, "kind", "")):
        case "sft":
            return _sft(name, values, shape, reader, shards)
        case "reward":
            return _reward(name, values, shape, reader, shards)
        case "preference":
            return _preference(name, values, shape, reader, shards)
        case "best_of_n":
            return _best_of_n(name, values, shape, reader, shards)
        case "ppo" | "group":
            return _rl(name, values, shape, reader, shards)
        case "evaluate" | "tasks" | "revise":
            return _sampled(name, values, shape, reader)
        case kind:
            labels = _labels(values, reader, name) if kind == "label" else 0.0
            return StageWork(name=name, kind=kind, family="other", shape=shape, labels=labels)


def _training(name: str, values: Any, shape: ModelShape, shards: int, steps: int, notes: tuple[str, ...]) -> StageWork:
    """What all stages that train have in common: one model that learns in so many steps."""
    return StageWork(
        name=name,
        kind=values.kind,
        family="supervised",
        shape=shape,
        holding=holding_of(values, shards=shards),
        learners=("model",),
        layers=shape.layers,
        steps=steps,
        micro_batch=values.micro_batch,
        saves=_saves(values, steps),
        is_compiled=values.memory.compile is not False,
        notes=notes,
    )


def _sft(name: str, values: Any, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    items = reader.items(name, "data", longest=values.max_length, too_long=values.too_long)
    steps = num_steps(items.count, epochs=values.epochs, batch=values.batch, max_steps=values.max_steps)
    return replace(
        _training(name, values, shape, shards, steps, items.notes),
        looked=items.steps(values.batch, count=steps, seed=reader.seed(name)),
    )


def _reward(name: str, values: Any, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    seed = reader.seed(name)
    items = reader.items(name, "data", longest=values.max_length, too_long=values.too_long)
    items = items if values.heldout else items.without(values.heldout_share, seed)
    steps = num_steps(items.count, epochs=values.epochs, batch=values.batch, max_steps=values.max_steps)
    return replace(
        _training(name, values, shape, shards, steps, items.notes),
        family="reward",
        members=values.members,
        layers=shape.layers - values.frozen_layers,
        looked=items.steps(values.batch, count=steps, seed=seed_for(seed, "member", 0)),
        has_logits=False,
        saves=values.members * _saves(values, steps),
    )


def _preference(name: str, values: Any, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    online = values.online
    if online is None:
        items = reader.items(name, "data", longest=values.max_length, too_long=values.too_long)
        items = items if values.heldout else items.without(values.heldout_share, reader.seed(name))
        steps = num_steps(items.count, epochs=values.epochs, batch=values.batch, max_steps=values.max_steps)
        looked, sampling = items.steps(values.batch, count=steps, seed=reader.seed(name)), None
    else:
        items = reader.items(name, "online.prompts", longest=online.max_prompt_tokens, too_long=online.too_long)
        pairs = items.count * (online.answers * (online.answers - 1) // 2 if online.pairs == "all" else 1)
        rounds = num_steps(pairs, epochs=values.epochs, batch=values.batch, max_steps=None)
        steps = min(online.rounds * rounds, values.max_steps or online.rounds * rounds)
        new = online.sampling.max_new_tokens
        asked = items.steps(values.batch, count=steps, seed=reader.seed(name))
        looked = [[_answered(item, 2, new) for item in step] for step in asked]
        sampling = _sampling_of(items.items, items.count * online.answers, new, online.rows, online.rounds)
    return replace(
        _training(name, values, shape, shards, steps, items.notes),
        reference=values.method.kind == "tdpo",
        rewards=1 if online is not None and _is_model(online.reward) else 0,
        looked=looked,
        micro_batch=values.batch if values.is_sorted else values.micro_batch,
        sampling=sampling,
        labels=_grades(sampling, None if online is None else online.reward),
        reads=1.0 / max(1.0, values.epochs),  # the reference is asked once of each answer, whatever the epochs are
    )


def _best_of_n(name: str, values: Any, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    items = reader.items(name, "prompts", longest=values.max_prompt_tokens, too_long=values.too_long)
    new, method = values.sampling.max_new_tokens, values.method
    is_bond = method.kind == "bond"
    rounds = 1 if is_bond else method.rounds
    per_round = num_steps(items.count, epochs=1.0 if is_bond else method.epochs, batch=values.batch, max_steps=None)
    steps = method.steps if is_bond else rounds * per_round
    steps = min(steps, values.max_steps or steps)
    rows = method.answers + 1 if is_bond else 1
    asked = items.steps(values.batch, count=steps, seed=reader.seed(name))
    sampling = _sampling_of(items.items, items.count * values.n, new, values.rows, rounds)
    return replace(
        _training(name, values, shape, shards, steps, items.notes),
        rewards=1 if _is_model(values.reward) else 0,
        looked=[[_answered(item, rows, new) for item in step] for step in asked],
        sampling=sampling,
        labels=_grades(sampling, values.reward),
    )


def _rl(name: str, values: Any, shape: ModelShape, reader: DataReader, shards: int) -> StageWork:
    items = reader.items(name, "prompts", longest=values.max_prompt_tokens, too_long=values.too_long)
    new, iterations = values.sampling.max_new_tokens, min(values.iterations, values.max_steps or values.iterations)
    asked = items.steps(values.batch, count=iterations, seed=seed_for(reader.seed(name), "prompts"))
    answered = [[(row,) for item in step for row in _answered(item, values.answers, new)] for step in asked]
    has_critic = values.kind == "ppo"
    rewards = _reward_members(reader, name)
    sampling = _sampling_of(items.items, values.batch * values.answers, new, values.memory.generate_rows, iterations)
    return replace(
        _training(name, values, shape, shards, iterations, items.notes),
        family="rl",
        learners=("policy", "critic") if has_critic else ("policy",),
        reference=True,
        rewards=rewards,
        shared_reward=_sharing_reward(reader, name, values, shape),
        updates=values.epochs * values.minibatches,
        minibatches=values.minibatches,
        looked=[part for step in answered for part in _minibatches(step, values.minibatches)],
        batch_tokens=max((sum(row.tokens for item in step for row in item) for step in answered), default=0),
        has_average=values.ema is not None,
        sampling=sampling,
        labels=_grades(sampling, values.reward),
        reads=2.0 + has_critic + rewards,
        saves=_saves(values, iterations) + 1,
    )


def _sampled(name: str, values: Any, shape: ModelShape, reader: DataReader) -> StageWork:
    """Stages that draw answers and learn nothing; none where people write them."""
    if getattr(values, "models", True) == []:
        return StageWork(name=name, kind=values.kind, family="other", shape=shape)
    longest = values.max_prompt_tokens or max(1, (shape.window or 2**31) - values.max_new_tokens)
    items = reader.items(name, "prompts", longest=longest, too_long=values.too_long)
    models = len(getattr(values, "models", ())) or 1
    answers = items.count * getattr(values, "answers", 1)
    times = models * (1 + 2 * values.times if hasattr(values, "times") and values.by is None else 1)
    graded = models * answers * sum(_calls(getattr(values, field, None)) for field in ("reward", "gold"))
    by = getattr(values, "by", None)
    calls = (
        (f"{name}: {2 * values.times * answers:,} calls of {by.model} are no labels, and not counted",) if by else ()
    )
    return StageWork(
        name=name,
        kind=values.kind,
        family="sampling",
        shape=shape,
        sampling=_sampling_of(items.items, answers, values.max_new_tokens, values.rows, times),
        labels=graded + _compared(values, answers * max(1, models - 1)),
        notes=(*items.notes, *calls),
    )


def _labels(values: Any, reader: DataReader, name: str) -> float:
    """Labels of people, or replies of judges, in both orders."""
    tasks = _tasks(reader, name)
    judges = list(values.by) if isinstance(values.by, list) else [values.by]
    people = [judge.mean_labels() for judge in judges if hasattr(judge, "mean_labels")]
    replies = [2.0 * judge.votes for judge in judges if hasattr(judge, "votes")]
    return tasks * sum((*people, *replies))


def _tasks(reader: DataReader, name: str) -> int:
    """Tasks that a stage labels: those of a file, or those that another stage chooses."""
    for link in reader.wiring.links[name]:
        maker: Any = reader.recipe.stages.get(link.stage) if link.stage else None
        if getattr(maker, "kind", "") == "tasks":
            asked = reader.items(link.stage, "prompts", longest=2**31, too_long="cut").count
            return maker.number or asked
        if link.kinds == ("tasks",) and not link.stage:
            with Path(link.source()).open("rb") as file:
                return sum(1 for line in file if line.strip())
    return 0


def _reward_members(reader: DataReader, name: str) -> int:
    """Reward models that score the answers of a stage: the members of those that the recipe trains, and others."""
    links = [link for link in reader.wiring.links[name] if "reward_model" in link.kinds]
    made = [reader.recipe.stages.get(link.stage) if link.stage else None for link in links]
    return sum(int(getattr(maker, "members", 1)) for maker in made)


def _sharing_reward(reader: DataReader, name: str, values: Any, shape: ModelShape) -> frozenset[Roles]:
    """The ways under which the reward model can stand on the policy's weights: trained by this recipe on the same ones,
    with adapters for `lora`, with frozen layers for `trunk`."""
    makers = [
        link.stage for link in reader.wiring.links[name] if "reward_model" in link.kinds and link.field == "reward"
    ]
    maker: Any = reader.recipe.stages.get(makers[0]) if makers and makers[0] else None
    if maker is None or _start(reader, makers[0]) != _start(reader, name):
        return frozenset()
    if maker.lora is not None:
        return frozenset({"lora"})
    trunk = values.memory.trunk_layers or max(1, shape.layers // 2)
    return frozenset({"trunk"}) if maker.frozen_layers >= trunk else frozenset()


def _start(reader: DataReader, name: str) -> str:
    """What a stage starts from: another stage, or a model."""
    return next((link.stage or link.source() for link in reader.wiring.links[name] if link.field == "from"), "")


def _compared(values: Any, comparisons: int) -> float:
    """Labels of judges that compare, both orders of each comparison, and of the people who do."""
    judges = getattr(values, "judges", None) or [judge for judge in (getattr(values, "judge", None),) if judge]
    return float(sum(comparisons * getattr(judge, "wanted", 2) for judge in judges))


def _grades(sampling: Sampling | None, reward: Any) -> float:
    """Replies of judges that grade every answer that a stage learns from."""
    return float(sampling.answers * sampling.times * _calls(reward)) if sampling is not None else 0.0


def _calls(source: Any) -> int:
    """Of judges, for one answer that this source of rewards scores."""
    if parts := getattr(source, "parts", None):
        return sum(map(_calls, parts.values()))
    return int(getattr(source, "kind", "") == "judge")


def _answered(item: Item, rows: int, new_tokens: int) -> Item:
    """A prompt with so many answers, all as long as they may be."""
    (prompt,) = item[:1]
    return tuple(Row(prompt.tokens + new_tokens, new_tokens) for _ in range(rows))


def _minibatches(step: Step, count: int) -> list[Step]:
    """
    >>> [len(part) for part in _minibatches([(Row(1, 1),)] * 5, 2)]
    [3, 2]
    """
    return [step[place::count] for place in range(count)]


def _sampling_of(
    items: Sequence[Item], answers: int, new_tokens: int, rows: int | Literal["auto"], times: int
) -> Sampling:
    prompts = [item[0].tokens for item in items]
    return Sampling(
        answers=answers,
        prompt_tokens=sum(prompts) / len(prompts),
        longest_prompt=max(prompts),
        new_tokens=new_tokens,
        rows=rows,
        times=times,
    )


def _saves(values: Any, steps: int) -> int:
    return max(1, -(-steps // values.checkpoints.every))


def _is_model(reward: Any) -> bool:
    return isinstance(reward, str) or getattr(reward, "kind", "") == "model"
