"""Stage `ppo`: PPO with four roles (actor, critic, reward, reference)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
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
from kedge.trainers.settings import (
    CorrectionSettings,
    CreditSettings,
    KLSettings,
    PolicyLossSettings,
    PPOConfig,
    ScoreSettings,
    ValueLossSettings,
)


class PPOMemorySettings(MemorySettings):
    """How the roles are held in memory."""

    critic_from_reward: bool = True
    """The critic starts from the reward model where there is one, else from the policy."""


class LossSettings(Section):
    """The mathematics between rewards and updates; docs/ppo.md has a line on each."""

    credit: CreditSettings = CreditSettings()
    """From rewards to advantages and returns."""
    policy: PolicyLossSettings = PolicyLossSettings()
    """The clipped surrogate."""
    value: ValueLossSettings = ValueLossSettings()
    """The clipped squared error."""
    correct: Correction = "auto"
    """Weights for answers that other weights or another engine sampled. `auto` makes them with a `generator.lag` and
    with generators other than `local`; null never does."""
    imitate: ImitationSettings | None = None
    """PTX: text to imitate alongside."""


class PPOSettings(Section):
    """Improve a policy against a reward while the reference holds it."""

    kind: Literal["ppo"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The policy to start from, and the reference; the recipe's `model` when absent."""
    reward: Annotated[str | RewardSourceSettings, Input("reward_model")]
    """Who scores the answers: a reward stage or folder, or a source with its settings (docs/rewards.md)."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Another judge of the same answers, which is never learnt from: `gold/mean`."""
    prompts: Annotated[MixedData, Input("prompts")]
    """Prompts to answer."""
    roles: RolesName = "lora"
    """How the four roles are held: four models, adapters on one base, or tops on one shared trunk."""
    memory: PPOMemorySettings = PPOMemorySettings()
    """Their type, adapters, recomputation, compilation."""
    generator: GeneratorSettings = LocalSettings()
    """Who samples the answers: `local`, in this process with the policy's own weights, or an installed generator."""
    iterations: int = Field(default=100, ge=1)
    """How many times to generate and learn."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most iterations, whatever `iterations` says: a step of this stage is one of them."""
    batch: int = Field(default=128, ge=1)
    """Prompts in one iteration."""
    answers: int = Field(default=1, ge=1)
    """Answers sampled for each prompt."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the responses of one iteration."""
    minibatches: int = Field(default=4, ge=1)
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
    loss: LossSettings = LossSettings()
    """From rewards to the losses of policy and critic."""
    critic_warmup: int = Field(default=0, ge=0)
    """In the first so many iterations only the critic learns."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Keep an average of the policy's weights with this decay a step (0.992), and save that."""
    actor: OptimiserSettings = OptimiserSettings(lr=1e-6, eps=1e-5, schedule="constant")
    """AdamW of the policy."""
    critic: OptimiserSettings = OptimiserSettings(lr=5e-6, eps=1e-5, schedule="constant")
    """AdamW of the value model."""
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

    def config(self) -> PPOConfig:
        """What the loop reads."""
        return PPOConfig(
            kl=self.kl,
            scores=self.scores,
            credit=self.loss.credit,
            policy=self.loss.policy,
            value=self.loss.value,
            # With the sampler's own log-probs every ratio is 1.
            correct=None if self.loss.policy.old_logprobs == "sampled" else correction(self),
            epochs=self.epochs,
            minibatches=self.minibatches,
            critic_warmup=self.critic_warmup,
            max_new_tokens=self.sampling.max_new_tokens,
        )


def explain(settings: PPOSettings) -> list[str]:
    one = words.on_policy(settings.batch, settings.answers, settings.epochs, settings.minibatches, settings.micro_batch)
    iterations = num_iterations(settings)
    total = iterations * settings.batch * settings.answers
    in_all = f"{words.count(iterations, 'iteration')}: {words.count(total, 'response')} in all"
    return [*one, in_all, *explain_lag(settings), *explain_looks(settings.eval, iterations)]


def check(settings: PPOSettings) -> Iterator[Finding]:
    yield from check_rl(settings, is_mismatch_measured=settings.loss.policy.old_logprobs == "recomputed")
    if settings.loss.policy.old_logprobs == "sampled":
        yield Finding(
            level="warning",
            code="ppo.sampled_logprobs",
            message="loss.policy.old_logprobs is sampled, so policy/mismatch is not measured: generator and trainer "
            "are taken to agree, which they do to 1e-6 nats a token in float32 on a CPU, and to 0.01 on a GPU",
            where="loss.policy.old_logprobs",
            fix="on a GPU leave it out (recomputed): there the ratio would not start at 1",
        )
        yield from _check_sampled(settings)
    if settings.critic_warmup >= num_iterations(settings):
        yield Finding(
            level="fatal",
            code="ppo.warmup",
            message=f"critic_warmup {settings.critic_warmup} leaves none of {num_iterations(settings)} iterations in "
            "which the policy learns",
            where="critic_warmup",
            fix="set a smaller critic_warmup, or more iterations",
        )


def _check_sampled(settings: PPOSettings) -> Iterator[Finding]:
    """What cannot be had with the log-probs that the generator noted."""
    if lag := lag_of(settings.generator):
        yield Finding(
            level="fatal",
            code="ppo.sampled_lag",
            message=f"generator.lag is {lag} and loss.policy.old_logprobs is sampled: the ratio would be that to "
            f"weights up to {lag} versions old, and neither it nor the KL would be of the policy",
            where="loss.policy.old_logprobs",
            fix="leave old_logprobs out (recomputed), or set generator.lag to 0",
        )
    elif isinstance(settings.loss.correct, CorrectionSettings):
        yield Finding(
            level="fatal",
            code="ppo.sampled_correct",
            message="loss.correct weighs answers by the trainer's log-probs over the generator's, and with "
            "loss.policy.old_logprobs: sampled both are the generator's: every weight would be 1",
            where="loss.correct",
            fix="leave old_logprobs out (recomputed), or leave loss.correct out",
        )


STAGE = Stage(
    summary="PPO with four roles: actor, critic, reward, reference.",
    settings=PPOSettings,
    makes={"model": "model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_prompt_tokens,
    prompts=prompt_use,
    run="kedge.stages.ppo.train:train",
)
