"""Stage `preference`: DPO and its family, on preferences that are given, or made online from the policy's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, model_validator

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.core.stage import ArtifactKind, Input, MayChange, MixedData, PromptUse, ReadData, Stage, TooLong
from kedge.models.settings import AutoSize, LoraSettings, TrainingMemory, check_offload
from kedge.models.training.preference_methods import DPO, KTO, SORTED, TDPO, Method, method_name, needs_reference
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.preference.online_settings import OnlineSettings, check_online, explain_online
from kedge.stages.shared import batch_arithmetic
from kedge.trainers.supervised import EvalSettings

FULL_RATE: Final = 5e-7
"""Zephyr's rate of DPO for all weights (Tunstall et al. 2023), within what SimPO and TDPO were tuned over."""
ORPO_RATE: Final = 8e-6
"""ORPO also does the imitation, and so wants the rate of its paper."""
WARMUP: Final = 0.1
"""Share of the steps over which the rate rises: Zephyr's and SimPO's."""
LORA_FACTOR: Final = 10
"""Adapters want about ten times the rate of full training."""
FEW_ANSWERS: Final = 8
"""Below so many answers a step, KTO's reference point is mostly noise."""


class PreferenceSettings(Section):
    """Learn from preferences directly."""

    kind: Literal["preference"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The policy to start from, which is also the reference; the recipe's `model` when absent."""
    method: Method = DPO()
    """What is optimised: `dpo`, `ipo`, `orpo`, `simpo`, `cpo`, `kto`, `tdpo`, or one with settings `{kind: dpo, …}`."""
    data: Annotated[MixedData | None, Input("pairs", "rankings", "thumbs")] = None
    """Preference pairs, or rankings, of which every strict pair is taken; for `kto` thumbs or pairs."""
    online: OnlineSettings | None = None
    """Make pairs of the policy's own answers, in rounds; alone, or beside `data`."""
    heldout: Annotated[ReadData | None, Input("pairs", "rankings", "thumbs")] = None
    """Preferences for evaluation, never trained on; without it, a share of `data` or of the first round."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts that is held out where no file is given for it."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights; the reference is the base without them."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the data; online, over the pairs of a round."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most optimiser steps, all rounds together; the learning rate falls to its end by then."""
    batch: int = Field(default=64, ge=1)
    """Pairs (`kto`: answers) in one optimiser step."""
    micro_batch: Annotated[AutoSize, MayChange()] = "auto"
    """Pairs in memory at once: `auto` is as many tokens as the device has room for and computes fastest, chosen at
    the start; a number is so many of them. It changes speed and memory, never the update."""
    max_length: int = Field(default=1024, ge=8)
    """Longest prompt plus answer in tokens."""
    too_long: TooLong = "drop"
    """What happens to a preference with a longer one: `refuse` starts nothing, `drop` leaves it out, `cut` takes the
    beginning of its prompt away."""
    memory: TrainingMemory = TrainingMemory()
    """Types of the weights, recomputation, compilation."""
    optimiser: OptimiserSettings = OptimiserSettings(lr=FULL_RATE, warmup=WARMUP)
    """AdamW and its schedule, which begins anew in each round. Unless given, `lr` follows the method: 5e-7, orpo 8e-6;
    with LoRA ten times that."""
    eval: EvalSettings = EvalSettings()
    """When held-out preferences are evaluated, and early stopping."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """How often the run is saved."""
    samples: int = Field(default=8, ge=0)
    """Fixed prompts answered before and after training; online, prompts whose answers are written in each round."""
    sample_tokens: int = Field(default=64, ge=1)
    """Longest of these answers; online it is `online.sampling` that says so."""

    @model_validator(mode="before")
    @classmethod
    def _published_rate(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        values = cast("dict[str, Any]", given)
        rate = ORPO_RATE if method_name(values.get("method")) == "orpo" else FULL_RATE
        published = {"lr": rate * LORA_FACTOR if values.get("lora") is not None else rate, "warmup": WARMUP}
        optimiser: Any = values.get("optimiser", {})
        return {**values, "optimiser": {**published, **optimiser}} if isinstance(optimiser, dict) else values

    @property
    def is_sorted(self) -> bool:
        """Whether the loss sorts over a whole step, which is not cut then."""
        return isinstance(self.method, DPO) and self.method.loss in SORTED

    @model_validator(mode="after")
    def _a_sorted_step_is_whole(self) -> PreferenceSettings:
        rows = self.batch if self.micro_batch == "auto" else self.micro_batch
        if isinstance(self.method, DPO) and self.method.loss in SORTED and rows < self.batch:
            raise ValueError(
                f"loss '{self.method.loss}' sorts over a whole step, which cannot be cut then: micro_batch is "
                f"{self.micro_batch}, and must be auto, or at least the batch, {self.batch}"
            )
        return self

    @model_validator(mode="after")
    def _there_is_something_to_learn_from(self) -> PreferenceSettings:
        if self.data is None and self.online is None:
            raise ValueError("there is nothing to learn from: give `data` (a file of preferences), `online`, or both")
        return self

    @model_validator(mode="after")
    def _online_fits_the_method(self) -> PreferenceSettings:
        if self.online is None:
            return self
        name = self.method.kind
        if self.online.longest > self.max_length:
            raise ValueError(
                f"online: prompt and answer may have {self.online.longest:,} tokens (max_prompt_tokens and "
                f"sampling.max_new_tokens), and max_length is {self.max_length:,}: raise it, or allow fewer"
            )
        if isinstance(self.method, KTO) and self.online.pairs == "all":
            raise ValueError("online.pairs is 'all', but kto learns from single answers: take 'best_worst'")
        if self.online.reference == "round" and not needs_reference(self.method):
            raise ValueError(f"online.reference is 'round', but method '{name}' has no reference: leave it out")
        if self.online.reference == "round" and isinstance(self.method, TDPO) and self.lora is not None:
            raise ValueError(
                "online.reference is 'round': tdpo asks the reference at every step, and beside adapters that is the "
                "base; take 'start', or train without lora"
            )
        return self


def explain(settings: PreferenceSettings) -> list[str]:
    noun = "answer" if isinstance(settings.method, KTO) else "pair"
    micro_batch = settings.batch if settings.is_sorted else settings.micro_batch
    lines = batch_arithmetic.supervised(
        settings.batch, micro_batch, settings.epochs, noun, max_steps=settings.max_steps
    )
    if settings.online:
        lines = [*explain_online(settings.online, with_data=settings.data is not None), f"{lines[0]} of a round"]
    if isinstance(settings.method, TDPO):
        reference = "the policy without its adapters" if settings.lora else "a second model in memory"
        lines.append(f"{settings.method.kind}: the reference, {reference}, is asked at every step")
    elif needs_reference(settings.method):
        when = "once a round, before it is learnt" if settings.online else "once, before training"
        lines.append(f"{settings.method.kind}: the reference is asked {when}, and its log-probs are kept")
    else:
        lines.append(f"{settings.method.kind}: no reference")
    return lines


def check(settings: PreferenceSettings) -> Iterator[Finding]:
    yield from check_offload("preference", settings.memory, {"optimiser": settings.optimiser})
    if settings.online:
        yield from check_online(settings.online)
    if isinstance(settings.method, KTO) and settings.batch < FEW_ANSWERS:
        yield Finding(
            level="warning",
            code="preference.few_answers",
            message=f"batch is {settings.batch}: kto estimates its reference point from the answers of one step, and "
            "from so few it is mostly noise",
            where="batch",
            fix=f"use {FEW_ANSWERS} or more; the paper uses 32",
        )


def inputs(settings: PreferenceSettings) -> Mapping[str, tuple[ArtifactKind, ...]]:
    """KTO learns from single answers, of which a pair is two; all others compare answers."""
    kinds: tuple[ArtifactKind, ...] = ("thumbs", "pairs") if isinstance(settings.method, KTO) else ("pairs", "rankings")
    return {"data": kinds, "heldout": kinds}


def prompt_use(settings: PreferenceSettings) -> PromptUse | None:
    """How the prompts of the rounds are asked; None offline."""
    return settings.online.round_settings(samples=0).prompt_use(under="online.") if settings.online else None


STAGE = Stage(
    summary="Preferences learnt directly: DPO and its family, offline or online.",
    settings=PreferenceSettings,
    makes={"model": "model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_length,
    inputs=inputs,
    prompts=prompt_use,
    run="kedge.stages.preference.train:train",
)
