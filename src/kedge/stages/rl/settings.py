"""What the RL stages have in common: sections of their settings, and what is checked of them. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.plugin_sections import PluginSection, installed_name, kind_of
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, PartName, PromptUse, TooLong
from kedge.models.settings import (
    AutoSize,
    BaseBits,
    LoraSettings,
    OffloadName,
    TrainingMemory,
    check_offload,
    offload_names,
    shared_reference,
)
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.rewards.settings import FailureSettings, MixSource, ModelSource, RewardSourceSettings
from kedge.rollout.generators import GeneratorUse, check_generator
from kedge.rollout.settings import SamplingSettings, lag_of
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.rl.look_settings import LookSettings, check_looks
from kedge.stages.shared.batch_arithmetic import count
from kedge.trainers.settings import CorrectionSettings, KLSettings, ScoreSettings

GeneratorSettings = Annotated[Section, PluginSection("generators")]
"""Who samples: `local`, or any installed generator with its settings, `{kind: NAME, …}`."""
Correction = CorrectionSettings | Literal["auto"] | None
"""Weights for answers that other weights sampled; `auto`: where answers can be of other weights or another engine."""
RolesName = Annotated[str, AfterValidator(installed_name("roles")), PartName("roles")]
"""A way of holding the roles: `separate`, `lora`, `trunk`, or any that is installed."""


class MemorySettings(TrainingMemory):
    """How the roles are held in memory."""

    lora: LoraSettings = LoraSettings()
    """Adapters of the roles that learn, under `roles: lora`."""
    trunk_layers: int | None = Field(default=None, ge=1)
    """Lower layers that are shared under `roles: trunk`; the lower half when absent."""
    frozen_bits: BaseBits = 16
    """Bits a weight of the reference and of reward models under `roles: separate`; 8 and 4 need CUDA and bitsandbytes,
    and the policy is then held to a rounded reference (docs/ppo.md)."""
    offload: Annotated[tuple[OffloadName, ...], offload_names("optimiser", "reference", "reward"), MayChange()] = ()
    """What is in the host's memory between its turns: `optimiser` (AdamW's moments and the float32 copies of weights in
    bfloat16, of policy and critic), `reference`, `reward` (the models behind `reward` and `gold`). It changes speed and
    memory of a GPU, never a number; on a CPU it does nothing."""
    generate_rows: Annotated[AutoSize, MayChange()] = "auto"
    """Answers sampled at once; `auto` is all of an iteration whose cache fits. It changes speed and memory, never an
    answer."""


class ImitationSettings(Section):
    """PTX: keep imitating some text alongside, against forgetting (Ouyang et al. 2022)."""

    data: Annotated[str, Input("demonstrations")]
    """Conversations to imitate."""
    weight: float = Field(default=0.1, gt=0)
    """Of their loss beside the policy's."""
    batch: int = Field(default=8, ge=1)
    """Conversations beside every step of the policy."""
    max_length: int = Field(default=512, ge=8)
    """Longest of them in tokens; longer ones are left out and counted."""


class LoggingSettings(Section):
    """What is written of the answers while a run goes on."""

    every: int = Field(default=10, ge=1)
    """Iterations between two sets of samples; the first and the last always have one."""
    samples: int = Field(default=4, ge=0)
    """Answers in a set."""
    gold_every: int = Field(default=1, ge=1)
    """Iterations between two evaluations by the gold source."""


class StopSettings(Section):
    """What ends a run before its last iteration, besides the KL budget."""

    overoptimisation: bool = False
    """Stop at the predicted peak of the gold score (Gao et al. 2022); needs `gold`."""


class LossSettings(Protocol):
    """The part of a method's loss that all RL stages have."""

    @property
    def imitate(self) -> ImitationSettings | None: ...
    @property
    def correct(self) -> Correction: ...


class RLSettings(Protocol):
    """The settings that all RL stages have."""

    @property
    def kind(self) -> str: ...
    @property
    def reward(self) -> str | RewardSourceSettings: ...
    @property
    def gold(self) -> str | RewardSourceSettings | None: ...
    @property
    def roles(self) -> str: ...
    @property
    def memory(self) -> MemorySettings: ...
    @property
    def generator(self) -> Section: ...
    @property
    def iterations(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def answers(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def micro_batch(self) -> AutoSize: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    @property
    def too_long(self) -> TooLong: ...
    @property
    def balance(self) -> str | None: ...
    @property
    def sampling(self) -> SamplingSettings: ...
    @property
    def kl(self) -> KLSettings: ...
    @property
    def scores(self) -> ScoreSettings: ...
    @property
    def loss(self) -> LossSettings: ...
    @property
    def ema(self) -> float | None: ...
    @property
    def actor(self) -> OptimiserSettings: ...
    @property
    def failures(self) -> FailureSettings: ...
    @property
    def logging(self) -> LoggingSettings: ...
    @property
    def eval(self) -> LookSettings | None: ...
    @property
    def detectors(self) -> DetectorSettings: ...
    @property
    def stop(self) -> StopSettings: ...
    @property
    def checkpoints(self) -> CheckpointSettings: ...


def num_iterations(settings: RLSettings) -> int:
    """How many times a run generates and learns: `max_steps` bounds `iterations`."""
    return min(settings.iterations, settings.max_steps or settings.iterations)


def is_always_new(settings: RLSettings) -> bool:
    """Whether all answers are of the policy as it is and of our own engine, so that there is nothing to correct."""
    return lag_of(settings.generator) == 0 and kind_of(settings.generator) == "local"


def correction(settings: RLSettings) -> CorrectionSettings | None:
    """The correction that a run makes; None where it makes none."""
    if settings.loss.correct == "auto":
        return None if is_always_new(settings) else CorrectionSettings()
    return settings.loss.correct


def explain_lag(settings: RLSettings) -> list[str]:
    """How old answers may be, where they may be old at all."""
    lag = lag_of(settings.generator)
    if lag == 0:
        return []
    ages = ", ".join(map(str, range(lag + 1)))
    return [f"answers are sampled ahead of the policy: of batch after batch they are {ages}, {lag}, … versions old"]


def prompt_use(settings: RLSettings) -> PromptUse:
    """How the prompts of an RL stage are asked."""
    sources = {"reward": settings.reward, "gold": settings.gold}
    return PromptUse(
        field="prompts",
        max_tokens=settings.max_prompt_tokens,
        max_new_tokens=settings.sampling.max_new_tokens,
        too_long=settings.too_long,
        rewards={field: source for field, source in sources.items() if source is not None},
        max_unscored=settings.failures.max_share,
    )


def check_rl(settings: RLSettings, *, is_mismatch_measured: bool = True) -> Iterator[Finding]:
    """What is wrong with the settings that all RL stages have. `is_mismatch_measured`: whether the trainer computes the
    log-probs of the answers itself too."""
    yield from _check_generator(settings, is_mismatch_measured=is_mismatch_measured)
    yield from check_looks(settings.eval, settings.kind, num_iterations(settings))
    yield from _check_memory(settings)
    responses = settings.batch * settings.answers
    if settings.minibatches > responses:
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.minibatches",
            message=f"{settings.minibatches} minibatches cannot be cut from {responses} responses",
            where="minibatches",
            fix=f"set minibatches to at most {responses}, or a larger batch",
        )
    if settings.stop.overoptimisation and settings.gold is None:
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.no_gold",
            message="stop.overoptimisation needs a gold source: its score is what has a peak",
            where="stop.overoptimisation",
            fix="give `gold` a judge that is not learnt from, or leave it out",
        )
    if settings.kl.start == 0 and settings.kl.limit is None:
        yield Finding(
            level="warning",
            code=f"{settings.kind}.no_anchor",
            message="kl.start is 0 and there is no kl.limit: nothing holds the policy to the reference",
            where="kl",
            fix="set kl.start, or kl.limit so that the run stops before the reward is hacked",
        )
    yield from _check_lengths(settings)
    if settings.kl.start == 0 and settings.kl.limit is not None and settings.kl.on_limit == "rollback":
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.kl_rollback",
            message="kl.start is 0 and kl.on_limit is rollback: after a rollback the coefficient is "
            f"{settings.kl.rollback_factor:g} times 0, which is 0, so the run would break its budget again",
            where="kl.start",
            fix="set kl.start to a small number (0.05), or kl.on_limit to stop",
        )
    yield from _check_lag(settings)
    if settings.kl.target is not None and settings.kl.start == 0:
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.kl_start",
            message="kl.start is 0, and a coefficient of 0 stays 0 however it is steered to kl.target",
            where="kl.start",
            fix="set kl.start to a small number (0.05)",
        )


def _check_memory(settings: RLSettings) -> Iterator[Finding]:
    """What cannot be moved to the host, and what cannot be rounded."""
    memory, critic = settings.memory, getattr(settings, "critic", None)
    optimisers = {"actor": settings.actor, **({} if critic is None else {"critic": critic})}
    yield from check_offload(settings.kind, memory, optimisers)
    if "reference" in memory.offload and settings.roles in ("lora", "trunk"):
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.offload",
            message=shared_reference(settings.roles),
            where="memory.offload",
        )
    if "reward" in memory.offload and not any(map(has_model, (settings.reward, settings.gold))):
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.offload",
            message="memory.offload has reward, and no reward model scores here: there is nothing to move",
            where="memory.offload",
            fix="leave reward out of memory.offload",
        )
    if memory.frozen_bits != 16 and settings.roles != "separate":
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.frozen_bits",
            message=f"memory.frozen_bits is {memory.frozen_bits}, and under roles: {settings.roles} frozen roles have "
            "no models of their own",
            where="memory.frozen_bits",
            fix="use roles: separate; under roles: lora it is memory.lora.base_bits that rounds the shared base",
        )


def has_model(source: str | RewardSourceSettings | None) -> bool:
    """Whether a reward model is among the sources."""
    match source:
        case str() | ModelSource():
            return True
        case MixSource():
            return any(map(has_model, source.parts.values()))
        case _:
            return False


def _check_lengths(settings: RLSettings) -> Iterator[Finding]:
    """Prices of length that no answer, or every answer, would pay."""
    if settings.scores.overlong_buffer and settings.scores.overlong_buffer > settings.sampling.max_new_tokens:
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.overlong",
            message=f"scores.overlong_buffer {settings.scores.overlong_buffer} is more than the longest answer, "
            f"sampling.max_new_tokens {settings.sampling.max_new_tokens}",
            where="scores.overlong_buffer",
            fix="set a smaller buffer (a quarter of the longest answer is usual)",
        )
    if settings.scores.length and settings.scores.length.least > settings.sampling.max_new_tokens:
        yield Finding(
            level="fatal",
            code=f"{settings.kind}.length",
            message=f"scores.length.least {settings.scores.length.least} is more than the longest answer, "
            f"sampling.max_new_tokens {settings.sampling.max_new_tokens}: every answer would be too short",
            where="scores.length.least",
            fix="set a range within the longest answer",
        )


def _check_generator(settings: RLSettings, *, is_mismatch_measured: bool) -> Iterable[Finding]:
    """What the generator cannot do of what the stage asks."""
    use = GeneratorUse(
        sampling=settings.sampling,
        base_bits=settings.memory.lora.base_bits if settings.roles == "lora" else 16,
        is_mismatch_measured=is_mismatch_measured,
        lora=settings.memory.lora if settings.roles == "lora" else None,
    )
    return check_generator(settings.generator, use)


def _check_lag(settings: RLSettings) -> Iterator[Finding]:
    """What follows from answers that are older than the policy."""
    lag = lag_of(settings.generator)
    if lag == 0:
        return
    if correction(settings) is None:
        yield Finding(
            level="warning",
            code=f"{settings.kind}.uncorrected_lag",
            message=f"generator.lag is {lag} and loss.correct is null: answers of older weights are learnt from, and "
            "their KL is measured, as if the policy had sampled them",
            where="loss.correct",
            fix="leave loss.correct out, and each token counts for its ratio of probabilities",
        )
    if settings.kl.limit is not None:
        yield Finding(
            level="info",
            code=f"{settings.kind}.kl_limit_lag",
            message=f"kl.limit {settings.kl.limit:g} is measured on answers up to {count(lag, 'version')} old, by "
            f"their weights: the policy may be over it for up to {lag + 1} iterations before the run sees it (1 "
            "without a lag); the last policy is measured on answers of its own",
            where="generator.lag",
            fix="set generator.lag to 0, or kl.limit lower, where the limit is a hard one",
        )
    if lag >= num_iterations(settings):
        yield Finding(
            level="warning",
            code=f"{settings.kind}.long_lag",
            message=f"generator.lag is {lag}, and of {count(num_iterations(settings), 'iteration')} all answers are of "
            "the policy that the run starts from",
            where="generator.lag",
            fix="set generator.lag to 1 or 2, or more iterations",
        )
