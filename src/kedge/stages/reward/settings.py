"""Stage `reward`: a reward model, or an ensemble of them, from preferences, with a report on how far to trust it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, ReadData, Stage, TooLong
from kedge.models.settings import AutoSize, Combine, LoraSettings, MeanOfMembers, TrainingMemory, check_offload
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.shared import batch_arithmetic
from kedge.trainers.supervised import EvalSettings

LengthControl = Literal["none", "balance", "residual"]
Labels = Literal["hard", "soft"]
Ties = Literal["drop", "half"]


class RewardLoss(Section):
    """What is minimised."""

    ranking: Literal["plackett_luce", "all_pairs"] = "plackett_luce"
    """Loss of rankings of three and more answers; comparisons of two are Bradley–Terry."""
    centre: float = Field(default=0.0, ge=0)
    """Weight of a penalty that keeps the scores of a comparison around zero (Eisenstein et al. 2023 use 0.01)."""
    margin: bool = False
    """Ask for a score difference of at least the data's `margin` (Llama 2, eq. 2)."""
    length_control: LengthControl = "none"
    """`balance` weighs pairs so that the longer answer wins half of the weight; `residual` gives what length explains
    to a length model first, so that the reward model learns the rest."""
    length_strength: float = Field(default=1.0, gt=0, le=1)
    """How much of the bias `length_control` takes out, in log-odds: 1 is all of it; a part costs less accuracy where
    the longer answer won."""


class RewardSettings(Section):
    """Learn to score answers from preferences."""

    kind: Literal["reward"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The model to start from; the recipe's `model` when absent."""
    data: Annotated[ReadData, Input("pairs", "rankings", several=True)]
    """Preference pairs or K-wise rankings. Several files are all learnt where there is one objective; with several
    objectives it is one file for each."""
    heldout: Annotated[ReadData | None, Input("pairs", "rankings", several=True)] = None
    """Preferences that the report is made on, files as in `data`; without it, a share of `data`."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts of `data` that is held out where no file is given for it."""
    demonstrations: Annotated[str | None, Input("demonstrations")] = None
    """Answers whose scores shall average 0; the preferred training answers when absent."""
    objectives: list[str] = Field(default_factory=lambda: ["reward"], min_length=1)
    """What the scores are about, one head each: `[helpfulness, harmlessness]` with two data files."""
    members: int = Field(default=1, ge=1, le=16)
    """How many models to train, with different seeds and data folds; LoRA members share one base."""
    combine: Combine = MeanOfMembers()
    """How the scores of several members become one."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights."""
    frozen_layers: int = Field(default=0, ge=0)
    """The embeddings and so many of the lowest transformer blocks do not learn; PPO's `roles: trunk` can share them."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data; more than one tends to overfit preferences."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most optimiser steps of each member; the learning rate falls to its end by then."""
    batch: int = Field(default=64, ge=1)
    """Comparisons in one optimiser step."""
    micro_batch: Annotated[AutoSize, MayChange()] = "auto"
    """Of them in memory at once: `auto` is as many tokens as the device has room for and computes fastest, chosen at
    the start; a number is so many of them. It changes speed and memory, never the update."""
    max_length: int = Field(default=1024, ge=8)
    """Longest prompt plus answer in tokens."""
    too_long: TooLong = "cut"
    """What happens to a longer one: `refuse` starts nothing, `drop` leaves its comparison out, `cut` takes its
    beginning away; its end, where it is scored, stays."""
    memory: TrainingMemory = TrainingMemory()
    """Types of the weights, recomputation, compilation."""
    loss: RewardLoss = RewardLoss()
    """What is minimised."""
    labels: Labels = "hard"
    """`soft` believes a pair as far as its `certainty` says (the probability that the chosen answer is the better one;
    1 where there is none); `hard` believes every pair."""
    ties: Ties = "drop"
    """Pairs of certainty 0.5, and two answers on one rank: `drop` leaves them out, `half` asks for equal scores."""
    weights: Annotated[str | None, Field(min_length=1)] = None
    """A field of the preferences' records that says how much each counts; all count the same when absent."""
    optimiser: OptimiserSettings = OptimiserSettings(lr=1e-5)
    """AdamW and its schedule."""
    eval: EvalSettings = EvalSettings()
    """When held-out loss and accuracy are measured, and early stopping."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """How often the run is saved."""
    groups: list[str] = Field(default_factory=list[str])
    """Fields of the preferences' records (language, source): the report has the accuracy for each of their values."""
    if_unfit: Annotated[Literal["stop", "go_on"], MayChange()] = "stop"
    """What to do when the report says that the model is not fit to optimise against."""


_ONE_FILE_EACH = "give one file for each objective, in the same order"


def wrong_number_of_files(field: str, count: int, objectives: Sequence[str]) -> str | None:
    """What is wrong with so many files of a field; nothing where each objective has one, or one objective has all.

    >>> wrong_number_of_files("data", 3, ["reward"])
    >>> wrong_number_of_files("data", 3, ["helpful", "brief"])
    '3 file(s) of `data` for 2 objectives (helpful, brief)'
    """
    if len(objectives) in (1, count):
        return None
    return f"{count} file(s) of `{field}` for {len(objectives)} objectives ({', '.join(objectives)})"


def explain(settings: RewardSettings) -> list[str]:
    lines = batch_arithmetic.supervised(
        settings.batch, settings.micro_batch, settings.epochs, "comparison", max_steps=settings.max_steps
    )
    if settings.members > 1:
        lines.append(f"{settings.members} members, each trained so on its own seed and fold of the data")
    return lines


def check(settings: RewardSettings) -> Iterator[Finding]:
    yield from check_offload("reward", settings.memory, {"optimiser": settings.optimiser})
    for field, files in (("data", settings.data), ("heldout", settings.heldout)):
        count = len(files) if isinstance(files, list) else 1
        wrong = None if files is None else wrong_number_of_files(field, count, settings.objectives)
        if wrong:
            yield Finding(level="fatal", code="reward.objectives", message=wrong, where=field, fix=_ONE_FILE_EACH)
    if settings.loss.length_control == "residual" and (settings.labels == "soft" or settings.ties == "half"):
        asked = "labels: soft" if settings.labels == "soft" else "ties: half"
        yield Finding(
            level="fatal",
            code="reward.labels",
            message=f"length_control: residual fits a length model to certain preferences, and {asked} has others",
            where="loss.length_control",
            fix="use length_control: balance, or labels: hard with ties: drop",
        )
    if settings.lora is not None and settings.frozen_layers:
        yield Finding(
            level="fatal",
            code="reward.frozen_layers",
            message=f"frozen_layers is {settings.frozen_layers}, but with lora the whole base is frozen already",
            where="frozen_layers",
            fix="leave out frozen_layers, or lora",
        )


STAGE = Stage(
    summary="A reward model, or an ensemble, from preferences.",
    settings=RewardSettings,
    makes={"model": "reward_model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_length if settings.too_long == "refuse" else None,
    run="kedge.stages.reward.train:train",
)
