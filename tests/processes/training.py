"""What processes do together in the tests of optimiser steps, roles, scores and samples: functions of a world.

Each is run by one process alone, with `ALONE`, and by several; what they give is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.core.answers import Answer
from kedge.core.batches import Batch
from kedge.core.errors import KedgeError, RewardError
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import cut, repeated, take
from kedge.core.world import Spent, World
from kedge.data.batching import TokenSequence, padded_batches
from kedge.models.forward.parts import gathered
from kedge.models.loading.load import load_causal
from kedge.models.roles.actor_critic import Critic, Imitation, RoleSet
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.models.training.adamw import FusedAdamW
from kedge.models.training.passes import Cut, InferenceSize, Passes, PassSize
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep
from kedge.rewards.failures import CountedSource, FailureCounter, ScoreResult, Source, unscored
from kedge.rewards.settings import FailureSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.shared import SharedGenerator
from kedge.testing.contracts.roles import answers_of, example_rollouts, example_spec, update_critic, update_policy

BUILDERS = {"separate": separate, "lora": lora, "trunk": trunk}
ROLES: dict[str, dict[str, Any]] = {
    "uneven rows": {"rows": 2},
    "one pass": {"rows": 16},
    "auto": {"rows": "auto"},
    "one row": {"first": 1},
    "imitation": {"imitated": 3},
    "one row to imitate": {"imitated": 1},
    "ema": {"ema": 0.5},
    "recompute": {"recompute": True},
}
NARROW: dict[str, dict[str, Any]] = {"two-byte types": {"rows": 2, "dtype": "bfloat16"}}
"""By name, what is unlike `example_spec`; `first` rows alone are learnt from, `imitated` ones stand beside them."""


def train_roles(world: World, way: str, base: Path, case: str) -> dict[str, Any]:
    """Two steps of actor and critic: weights, what the roles say before and after, and metrics."""
    options = dict((ROLES | NARROW)[case])
    first, imitated = options.pop("first", None), options.pop("imitated", 0)
    spec = replace(example_spec(base), world=world, **options)
    spec = replace(spec, imitation=Imitation(batches=_demonstrations(imitated), coef=0.3) if imitated else None)
    rollouts = take(example_rollouts(), slice(first))
    roles = BUILDERS[way](spec)
    before = answers_of(roles, rollouts)
    metrics = [dict(update(roles, rollouts)) for _ in range(2) for update in (update_policy, update_critic)]
    return {"metrics": metrics, "before": before, "after": answers_of(roles, rollouts), "weights": weights_of(roles)}


def weights_of(roles: RoleSet) -> dict[str, Tensor]:
    critic = roles.critic.train_step.weights() if isinstance(roles.critic, Critic) else {}
    named: dict[str, Mapping[str, Tensor]] = {
        "policy": roles.policy.weights(),
        "saved": roles.policy.final_weights(),
        "critic": critic,
    }
    return {
        f"{role} {name}": gathered(weight).clone()
        for role, weights in named.items()
        for name, weight in weights.items()
    }


def _demonstrations(rows: int) -> Any:
    sequences = [
        TokenSequence(tokens=list(range(40, 46 + row)), counted=[False, False, *[True] * (4 + row)])
        for row in range(rows)
    ]

    def batches(_: int) -> Cut[Batch]:
        return lambda size: padded_batches(sequences, rows=size.rows, tokens=size.tokens, shares=size.shares, pad=256)

    return batches


@dataclass(frozen=True)
class Rows:
    """Rows of a toy step: numbers, which are their lengths too."""

    numbers: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.numbers)


class Toy(nn.Module):
    """One weight that every row reaches, one that rows above 5 reach, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.full((2, 2), 0.5))
        self.some = nn.Parameter(torch.full((2, 2), 0.5))
        self.none = nn.Parameter(torch.full((2, 2), 0.5))

    def loss(self, batch: Rows) -> Tensor:
        x_R = torch.tensor(batch.numbers, dtype=torch.float32)
        loss = (self.all.sum() * x_R - 3).square().sum()
        large_R = x_R[x_R > 5]
        return loss + (self.some.sum() * large_R).sum() if len(large_R) else loss


def toy_step(toy: Toy, world: World, asked: Any = 2) -> TrainStep:
    settings = OptimiserSettings(lr=1e-2, schedule="constant", warmup=0.0, weight_decay=0.1)
    return TrainStep(list(toy.named_parameters()), settings, total_steps=9, passes=Passes(asked, world=world))


def toy_cut(numbers: Sequence[int]) -> Cut[Rows]:
    def batches(size: PassSize) -> list[Rows]:
        parts = cut(list(numbers), length=int, rows=size.rows, tokens=size.tokens, shares=size.shares)
        return [Rows(part) for part in parts]

    return batches


def learn_toy(world: World, numbers: Sequence[int], asked: Any) -> dict[str, Any]:
    """Two steps and a measurement, whose facts have names that a process without rows cannot know."""
    toy = Toy()
    step = toy_step(toy, world, asked)

    def sums(batch: Rows) -> Sums:
        largest = torch.tensor(float(max(batch.numbers)))
        return Sums(
            loss=toy.loss(batch),
            facts={"sum": torch.tensor(float(sum(batch.numbers)))},
            items=torch.tensor(2.0 * len(batch.numbers)),
            peaks={"largest": largest},
        )

    objective: Objective[Rows] = Objective(weight=lambda batch: float(len(batch.numbers)), sums=sums)
    metrics = [step.learn(Term(objective=objective, batches=toy_cut(numbers))) for _ in range(2)]
    metrics.append(step.measure(objective, toy_cut(numbers)))
    return {"metrics": metrics, "weights": {name: weight.clone() for name, weight in step.weights().items()}}


def refuse(world: World, poison: int) -> dict[str, Any]:
    """A step in which the loss of one row is not a number, and a good one after it."""
    toy = Toy()
    step = toy_step(toy, world)
    computed: list[int] = []

    def sums(batch: Rows) -> Sums:
        computed.extend(batch.numbers)
        return Sums(loss=toy.loss(batch) * (torch.nan if poison in batch.numbers else 1.0), facts={})

    objective: Objective[Rows] = Objective(weight=lambda batch: float(len(batch.numbers)), sums=sums)
    try:
        step.learn(Term(objective=objective, batches=toy_cut([2, 7, 4, 9])))
        error = ""
    except KedgeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    unchanged = all(torch.equal(weight, torch.full((2, 2), 0.5)) for weight in step.weights().values())
    of_bad_step = list(computed)
    poison = 0
    metrics = step.learn(Term(objective=objective, batches=toy_cut([2, 7, 4, 9])))
    return {"error": error, "unchanged": unchanged, "computed": of_bad_step, "metrics": metrics, "step": step.step}


def run_out_of_memory(world: World, rank: int, most: int) -> dict[str, Any]:
    """Passes of more than `most` tokens do not fit on process `rank`, with and without gradients."""
    toy, events = Toy(), list[str]()
    step = toy_step(toy, world)
    step.passes = Passes(4, world=world, report=lambda level, code, message: events.append(code))

    def fits(batch: Rows) -> None:
        if world.rank == rank and batch.num_tokens > most:
            raise torch.OutOfMemoryError("planted")

    def sums(batch: Rows) -> Sums:
        fits(batch)
        return Sums(loss=toy.loss(batch), facts={})

    objective: Objective[Rows] = Objective(weight=lambda batch: float(len(batch.numbers)), sums=sums)
    step.learn(Term(objective=objective, batches=toy_cut([2, 7, 4, 9, 1, 3, 5, 8])))
    inference = InferenceSize(torch.device("cpu"), 4, world=world)

    def doubled(rows: list[int]) -> Tensor:
        fits(Rows(rows))
        return torch.tensor(rows) * 2

    result = inference.by_length(range(8, 0, -1) if rank else range(1, 9), doubled)
    return {
        "size": str(step.passes.size),
        "inference": str(inference.size),
        "events": events,
        "weights": {name: weight.clone() for name, weight in step.weights().items()},
        "result": result,
    }


def draw_dropout(world: World) -> dict[str, Any]:
    """The random numbers of each process in two steps, and those that are drawn after them."""
    torch.manual_seed(7)
    toy, drawn = Toy(), list[float]()
    step = toy_step(toy, world)

    def sums(batch: Rows) -> Sums:
        drawn.append(torch.rand(()).item())
        return Sums(loss=toy.loss(batch), facts={})

    objective: Objective[Rows] = Objective(weight=lambda batch: float(len(batch.numbers)), sums=sums)
    for _ in range(2):
        step.learn(Term(objective=objective, batches=toy_cut([2, 7, 4, 9])))
    return {"drawn": drawn, "after": torch.rand(3)}


def add_up_narrow(world: World) -> list[Tensor | None]:
    """Gradients that autograd gave in bfloat16, added up before a fused step; the last weight is nobody's."""
    weights = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    backend = FusedAdamW(weights, masters, torch.optim.AdamW(masters))
    share = torch.tensor(1 + 2**-7 * (world.rank + 1), dtype=torch.bfloat16)
    backend.add((weights[0] * share).sum() if world.rank else (weights[0] * share + weights[1]).sum())
    backend.widen()
    backend.add_up(world, [True, True, False])
    return backend.gradients()


def judge_together(world: World, prompts: Sequence[str]) -> dict[str, Any]:
    """Answers by a source that knows them by their number: NaN, None and reasons among them, and who asked what."""
    asked: list[str] = []
    answers = [
        Answer(prompt=(("user", prompt),), text=str(number), is_finished=True, solution=None, extra={})
        for number, prompt in enumerate(prompts)
    ]

    def judge(some: Sequence[Answer]) -> list[ScoreResult]:
        asked.extend(answer.text for answer in some)
        return [
            unscored(f"no {answer.text}") if int(answer.text) % 3 == 2 else ScoreResult(float(answer.text))
            for answer in some
        ]

    counter = FailureCounter("reward", FailureSettings(max_share=1.0))
    results = CountedSource(Source(judge), counter, world=world).judge(answers)
    return {"results": [str(result) for result in results], "state": counter.state(), "asked": asked}


def judge_refuses(world: World, rank: int) -> str:
    """A source that refuses on one process alone."""

    def judge(some: Sequence[Answer]) -> list[ScoreResult]:
        if world.rank == rank:
            raise RewardError(f"refused by {rank}")
        return [ScoreResult(1.0) for _ in some]

    counter = FailureCounter("reward", FailureSettings())
    answers = [Answer(prompt=(("user", text),), text=text, is_finished=True) for text in "abcd"]
    try:
        CountedSource(Source(judge), counter, world=world).judge(answers)
    except RewardError as error:
        return str(error)
    return ""


def sample(world: World, base: Path, prompts: int, answers: int) -> list[Tensor]:
    """Tokens, masks, log-probs, groups and ends of some answers."""
    model = load_causal(str(base), dtype="float32")
    local = LocalGenerator(model, SamplingSettings(max_new_tokens=12), stop_ids=[258], pad=256, max_rows=4)
    generator = SharedGenerator(local, world, pad=256, device=model.device)
    rows = repeated([range(60, 64 + 2 * row) for row in range(prompts)], ids=range(prompts), answers=answers)
    generator.load_weights({}, version=3)
    rollouts = generator.submit(rows, 11).result()
    assert rollouts.version == 3
    return [
        rollouts.tokens_BT,
        rollouts.attention_mask_BT,
        rollouts.response_mask_BT,
        rollouts.group_B,
        rollouts.finished_B,
        rollouts.behaviour_logp_BT,
    ]


def spend_time(world: World, late: int, seconds: float) -> list[Spent]:
    """Process `late` works for some time before it adds up a large tensor with the others, as it did before this."""
    world.add(torch.ones(1))
    world.spent()
    if world.rank == late:
        time.sleep(seconds)
    world.add(torch.ones(2**20))
    return world.spent()


def process_id(world: World) -> tuple[int, int, int]:
    return os.getpid(), world.rank, world.size
