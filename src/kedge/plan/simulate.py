"""RL stages on several GPUs by the model of scale (`kedge.plan.scale`): layouts beside each other, nothing measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kedge.plan import scale
from kedge.plan.duration import DECODE_SHARE, LEARN_SHARE, READ_SHARE, TOKEN_LAYER_S
from kedge.plan.machines import Machine, links_of
from kedge.plan.shapes import ModelShape
from kedge.plan.work import StageWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One layout of one stage."""

    stage: str
    layout: str
    step_s: float
    seconds: float
    idle: float
    memory: float
    fits: bool


def simulate(work: StageWork, machine: Machine) -> Iterator[Simulated]:
    """The layouts that so many GPUs allow, of a stage that samples and learns; nothing for others."""
    if work.family != "rl" or work.sampling is None:
        return
    for name, layout in _layouts(machine.gpus):
        step = scale.step(_work(work), links_of(machine), _shares(work, machine), layout)
        yield Simulated(
            stage=work.name,
            layout=name,
            step_s=step.seconds,
            seconds=work.steps * step.seconds,
            idle=step.idle,
            memory=step.memory,
            fits=step.memory <= machine.memory,
        )


def _layouts(gpus: int) -> Iterator[tuple[str, scale.Layout]]:
    yield "shared, replicate", scale.Layout(gpus=gpus)
    if gpus == 1:
        return
    yield "shared, shard", scale.Layout(gpus=gpus, weights="shard")
    for lag in (0, 1):
        separate = scale.Layout(gpus=gpus, engines="separate", samplers=gpus // 2, weights="shard", lag=lag)
        yield f"half sample, shard, lag {lag}", separate


def _shares(work: StageWork, machine: Machine) -> scale.Shares:
    kind = machine.kind
    token_s = work.shape.layers * TOKEN_LAYER_S[kind]
    return scale.Shares(learn=LEARN_SHARE[kind], read=READ_SHARE[kind], decode=DECODE_SHARE[kind], token_s=token_s)


def _work(work: StageWork) -> scale.Work:
    assert work.sampling is not None
    assert work.holding is not None
    shape = _shape(work.shape)
    return scale.Work(
        policy=shape,
        critic=shape if "critic" in work.learners else None,
        frozen=(shape,) * (1 + work.rewards),
        answers=work.sampling.answers,
        prompt_tokens=max(1, round(work.sampling.prompt_tokens)),
        answer_tokens=work.sampling.new_tokens,
        epochs=max(1, work.updates // work.minibatches),
        updates=work.minibatches,
        recompute=work.holding.recompute,
    )


def _shape(shape: ModelShape) -> scale.Shape:
    return scale.Shape(parameters=shape.parameters, layers=shape.layers, width=shape.width, kv_width=shape.kv_width)
