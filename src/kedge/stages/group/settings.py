"""Stage `group`: RL without a critic (GRPO, RLOO, REINFORCE++, …). PPO's rollouts, rewards and KL contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from kedge.core import plugins
from kedge.core.errors import PluginError
from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.plugin_sections import PluginSection, kind_of
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, MixedData, Stage, TooLong
from kedge.models.settings import AutoSize
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.rewards.settings import FailureSettings, RewardSourceSettings
from kedge.rollout.generators import LocalSettings
from kedge.rollout.settings import SamplingSettings, lag_of
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.rl.look_settings import LookSettings, explain_looks
from kedge.stages.rl.settings import (
    Correction,
    GeneratorSettings,
    ImitationSettings,
    LoggingSettings,
    MemorySettings,
    RolesName,
    StopSettings,
    check_rl,
    correction,
    explain_lag,
    num_iterations,
    prompt_use,
)
from kedge.stages.shared import batch_arithmetic as words
from kedge.trainers.settings import KLSettings, ScoreSettings

if TYPE_CHECKING:
    from kedge.algorithms.group.method import GroupMethod
    from kedge.trainers.group import GroupConfig


def find_method(name: str) -> GroupMethod:
    """A critic-free method by its entry point; ours and others' are found alike."""
    from kedge.algorithms.group.method import GroupMethod  # torch, which a recipe without this stage need not wait for

    method = plugins.find("algorithms", name)
    if not isinstance(method, GroupMethod):
        raise PluginError(f"algorithm '{name}' is a {type(method).__name__}, expected a GroupMethod (docs/plugins.md)")
    return method


MethodSettings = Annotated[
    Section,
    PluginSection(
        "algorithms",
        noun="method",
        example="{kind: grpo, clip: 0.1}",
        section_of=lambda name: find_method(name).settings,
    ),
]
"""A method by its name, or with settings: `grpo`, `{kind: grpo, clip: 0.1}`."""


class GroupLossSettings(Section):
    """What is added to the loss of a method."""

    entropy: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of the policy."""
    stop_at_kl: float | None = Field(default=None, gt=0)
    """End the passes over a batch when a step's `approx_kl` passes this (1.5 times 0.01 is usual)."""
    correct: Correction = "auto"
    """Weights for answers that other weights or another engine sampled. `auto` makes them with a `generator.lag` and
    with generators other than `local`; null never does."""
    imitate: ImitationSettings | None = None
    """PTX: text to imitate alongside."""


class GroupSettings(Section):
    """Improve a policy by comparing its own answers, while the reference holds it. What a recipe does not say of
    `answers`, `minibatches`, `kl`, `max_rounds` and `scores.overlong_buffer` follows the method (docs/group.md)."""

    kind: Literal["group"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The policy to start from, and the reference; the recipe's `model` when absent."""
    method: MethodSettings = Field(default=cast(Any, "grpo"))  # validated as if a recipe said it
    """`grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce++`, `remax`, `gspo`, `cispo`, `dapo`, one that is installed
    from elsewhere (`kedge plugins`), or one with settings `{kind: grpo, …}`."""
    reward: Annotated[str | RewardSourceSettings, Input("reward_model")]
    """Who scores the answers: a reward stage or folder, or a source with its settings (docs/rewards.md)."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Another judge of the same answers, which is never learnt from: `gold/mean`."""
    prompts: Annotated[MixedData, Input("prompts")]
    """Prompts to answer."""
    roles: RolesName = "lora"
    """How the roles are held: models of their own, an adapter on one base, or tops on one shared trunk."""
    memory: MemorySettings = MemorySettings()
    """Their type, adapters, recomputation, compilation."""
    generator: GeneratorSettings = LocalSettings()
    """Who samples the answers: `local`, in this process with the policy's own weights, or an installed generator."""
    iterations: int = Field(default=100, ge=1)
    """How many times to generate and learn."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most iterations, whatever `iterations` says: a step of this stage is one of them."""
    batch: int = Field(default=64, ge=1)
    """Prompts in one iteration."""
    answers: int = Field(default=8, ge=1)
    """Answers sampled for each prompt."""
    max_rounds: int | None = Field(default=None, ge=1)
    """Dynamic sampling: groups whose scores are all equal are left out, and so many batches of prompts at most are
    answered until one is full. Null learns from every group."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the responses of one iteration."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps in one pass."""
    micro_batch: Annotated[AutoSize, MayChange()] = "auto"
    """Responses in memory at once: `auto` is as many tokens as the device has room for and computes fastest, chosen at
    the start; a number is so many of them. It changes speed and memory, never the update."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt."""
    too_long: TooLong = "refuse"
    """What happens to a longer one: `refuse` starts nothing, `drop` leaves it out, `cut` takes its beginning away."""
    balance: Annotated[str | None, Field(min_length=1)] = None
    """A field of the prompts' records (language, source): each of its values is drawn equally often."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    kl: KLSettings = KLSettings()
    """The anchor."""
    scores: ScoreSettings = ScoreSettings()
    """What is done to scores before they become rewards."""
    loss: GroupLossSettings = GroupLossSettings()
    """What is added to the loss."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Keep an average of the policy's weights with this decay a step (0.992), and save that."""
    actor: OptimiserSettings = OptimiserSettings(lr=1e-6, eps=1e-5, schedule="constant")
    """AdamW of the policy."""
    failures: FailureSettings = FailureSettings()
    """How many answers may go without a score."""
    logging: Annotated[LoggingSettings, MayChange()] = LoggingSettings()
    """What is written of the answers while a run goes on."""
    eval: LookSettings | None = None
    """Looks at the policy while it trains: exams, and a judge (docs/exams.md)."""
    detectors: Annotated[DetectorSettings, MayChange()] = DetectorSettings()
    """What a run warns of by itself (docs/detectors.md)."""
    stop: Annotated[StopSettings, MayChange()] = StopSettings()
    """What ends it early."""
    checkpoints: CheckpointSettings = CheckpointSettings(every=10)
    """How often the run is saved."""

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        values = cast("dict[str, Any]", given)
        try:
            traits = find_method(str(kind_of(values.get("method", "grpo")))).traits
        except PluginError:  # the field itself says what is wrong with it
            return values
        scalars = {"answers": traits.answers, "minibatches": traits.minibatches, "max_rounds": traits.max_rounds}
        sections: dict[str, dict[str, Any]] = {"kl": dict(traits.kl)}
        if traits.overlong_share is not None:
            longest = _longest(values.get("sampling", {}))
            sections["scores"] = {"overlong_buffer": max(1, round(traits.overlong_share * longest))}
        if traits.clips_often is not None:
            sections["detectors"] = {"policy": {"clips_often": traits.clips_often}}
        return {**scalars, **values, **{key: _over(part, values.get(key, {})) for key, part in sections.items()}}

    def config(self) -> GroupConfig:
        """What the loop reads."""
        from kedge.trainers.group import GroupConfig

        return GroupConfig(
            method=method_of(self),
            method_settings=self.method,
            kl=self.kl,
            scores=self.scores,
            entropy=self.loss.entropy,
            stop_at_kl=self.loss.stop_at_kl,
            correct=correction(self),
            epochs=self.epochs,
            minibatches=self.minibatches,
            max_new_tokens=self.sampling.max_new_tokens,
        )


def _over(published: Mapping[str, Any], own: Any) -> Any:
    """What a recipe gives of a section over what a method publishes of it, part by part; anything else as it is."""
    if not isinstance(own, Mapping):
        return own
    given = cast("Mapping[str, Any]", own)
    parts = {
        key: _over(cast("Mapping[str, Any]", value), given.get(key, {})) if isinstance(value, Mapping) else value
        for key, value in published.items()
        if key not in given or isinstance(value, Mapping)
    }
    return {**given, **parts}


def method_of(settings: GroupSettings) -> GroupMethod:
    return find_method(kind_of(settings.method))


def _longest(sampling: Any) -> int:
    """`sampling.max_new_tokens` before validation; where it is not a number, the section itself reports that."""
    default = SamplingSettings().max_new_tokens
    tokens: Any = (
        cast("dict[str, Any]", sampling).get("max_new_tokens", default) if isinstance(sampling, dict) else None
    )
    return tokens if isinstance(tokens, int) else getattr(sampling, "max_new_tokens", default)


def explain(settings: GroupSettings) -> list[str]:
    one = words.on_policy(settings.batch, settings.answers, settings.epochs, settings.minibatches, settings.micro_batch)
    iterations = num_iterations(settings)
    total = iterations * settings.batch * settings.answers
    told = [*one, f"{words.count(iterations, 'iteration')}: {words.count(total, 'response')} in all"]
    told += [*explain_lag(settings), *explain_looks(settings.eval, iterations)]
    if settings.max_rounds is not None:
        told.append(
            f"prompts whose answers all have the same score are left out; up to {settings.max_rounds} batches are "
            "answered until one is full"
        )
    if method_of(settings).traits.needs_greedy:
        told.append(f"{kind_of(settings.method)}: one more answer to each prompt, the likeliest, is the baseline")
    return told


def check(settings: GroupSettings) -> Iterator[Finding]:
    yield from check_rl(settings)
    traits, name = method_of(settings).traits, kind_of(settings.method)
    if settings.answers < 2 and (traits.needs_groups or settings.max_rounds is not None):
        who = f"{name} compares" if traits.needs_groups else "max_rounds compares"
        yield Finding(
            level="fatal",
            code="group.answers",
            message=f"answers is {settings.answers}, and {who} the answers to one prompt with each other: nothing "
            "would be learnt",
            where="answers",
            fix=f"set answers to 2 or more ({max(traits.answers, 4)} is usual)",
        )
    lag = lag_of(settings.generator)
    if lag and settings.max_rounds is not None and settings.max_rounds > 1:
        yield Finding(
            level="fatal",
            code="group.lag_rounds",
            message=f"generator.lag is {lag} and max_rounds is {settings.max_rounds}: which prompts come next would "
            "depend on the scores of answers that are still being sampled",
            where="max_rounds",
            fix="set max_rounds to 1 (groups of equal scores are left out and not replaced) or null, or "
            "generator.lag to 0",
        )
    steps = settings.epochs * settings.minibatches
    if traits.is_on_policy and steps > 1:
        yield Finding(
            level="warning",
            code="group.off_policy",
            message=f"{name} has no ratio of new to old probability, so it is right for answers of the policy as it "
            f"is; here {steps} steps are taken on them, and after the first one it is not",
            where="minibatches" if settings.minibatches > 1 else "epochs",
            fix="set epochs and minibatches to 1, or take grpo, reinforce++ or gspo",
        )


STAGE = Stage(
    summary="RL without a critic: GRPO, RLOO and their relatives.",
    settings=GroupSettings,
    makes={"model": "model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_prompt_tokens,
    prompts=prompt_use,
    run="kedge.stages.group.train:train",
)
