"""The settings of PPO's mathematics, one section a concern; defaults are the published ones (docs/ppo.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kedge.core.optimiser import Per
from kedge.core.settings import Section
from kedge.core.stage import MayChange


class KLSettings(Section):
    """How the policy is held to the reference."""

    start: float = Field(default=0.05, ge=0)
    """The coefficient of the KL penalty at the beginning."""
    target: float | None = Field(default=None, gt=0)
    """KL in nats a sequence that the coefficient is steered towards; without it the coefficient stays fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """How many responses it takes to correct an error; larger is slower."""
    kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Which estimate of the KL is paid for."""
    where: Literal["reward", "loss"] = "reward"
    """Taken from the reward of every token, or added to the loss of every token."""
    limit: Annotated[float | None, MayChange()] = Field(default=None, gt=0)
    """The budget: when `kl/mean` passes it, `on_limit` happens."""
    on_limit: Annotated[Literal["stop", "rollback", "pause"], MayChange()] = "stop"
    """Stop with the last policy within the budget; go back to it with a larger coefficient; or save all as it is and
    wait for --resume with another limit."""
    rollback_factor: float = Field(default=2.0, gt=1)
    """How much larger the coefficient is after a rollback."""
    max_rollbacks: Annotated[int, MayChange()] = Field(default=3, ge=0)
    """After so many the run stops."""

    @model_validator(mode="after")
    def _limit_is_above_target(self) -> KLSettings:
        if self.target is not None and self.limit is not None and self.limit <= self.target:
            raise ValueError(
                f"limit {self.limit:g} must be above target {self.target:g}: the target would stop the run"
            )
        return self


class LengthPrice(Section):
    """What answers cost whose length is outside of a range."""

    price: float = Field(gt=0)
    """Of each token outside, in units of score."""
    least: int = Field(default=0, ge=0)
    """Tokens below which an answer is too short."""
    most: int = Field(ge=1)
    """Tokens above which it is too long."""

    @model_validator(mode="after")
    def _is_a_range(self) -> LengthPrice:
        if self.least > self.most:
            raise ValueError(f"least {self.least} must not be above most {self.most}")
        return self


class ScoreSettings(Section):
    """What is done to the scores before they become rewards."""

    normalise: Literal["none", "scale", "standard"] = "none"
    """By the moments of all scores so far: divide by their std, or also subtract their mean."""
    clip: float | None = Field(default=None, gt=0)
    """Keep scores within plus and minus this."""
    missing_eos_penalty: float | None = Field(default=None, ge=0)
    """Subtracted from the score of an answer that did not end by itself."""
    missing_eos_score: float | None = None
    """In place of the score of an answer that did not end by itself (the EOS trick: -1)."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """The last so many tokens before the longest answer cost up to `overlong_penalty`."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What the longest answer costs, in units of score."""
    length: LengthPrice | None = None
    """A price of every token by which an answer is shorter or longer than a range."""

    @model_validator(mode="after")
    def _one_way_for_missing_ends(self) -> ScoreSettings:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError("missing_eos_penalty and missing_eos_score exclude each other: set one of them")
        return self


class CreditSettings(Section):
    """From rewards to advantages and returns."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Of generalised advantage estimation: 1 trusts the rewards alone, 0 the critic alone."""
    scale_rewards: bool = False
    """Rewards of tokens to unit variance over the batch, their mean kept."""
    whiten_advantages: bool = True
    """Advantages to zero mean and unit variance over the whole batch."""


class PolicyLossSettings(Section):
    """The clipped surrogate."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability counts between 1 - clip and 1 + clip."""
    clip_high: float | None = Field(default=None, gt=0)
    """Another bound above (clip-higher: 0.28); None is the same as below."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token that became likely although it was bad (3 is usual)."""
    entropy: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of the policy."""
    per: Per = "token"
    """What the loss is a mean over."""
    stop_at_kl: float | None = Field(default=None, gt=0)
    """End the passes over a batch when a step's `approx_kl` passes this (1.5 times 0.01 is usual)."""
    old_logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """The log-probs that ratio and KL start from: computed once more as the trainer computes, or as the generator noted
    them when it drew the tokens, which saves a pass over every batch."""


class CorrectionSettings(Section):
    """Weights for answers that other weights or another engine sampled: truncated importance sampling."""

    cap: float = Field(default=2.0, gt=0)
    """A weight, the ratio of the policy's probability before the update to that of the sampler, is at most this."""
    per: Literal["token", "sequence"] = "token"
    """A ratio a token, which leaves out that the tokens before it were sampled otherwise too; or one an answer, which
    does not, and spreads with its length."""
    drop: tuple[float, float] | None = None
    """Leave out answers whose geometric mean ratio is outside these two ([0.99, 1.01] is usual)."""

    @model_validator(mode="after")
    def _drop_keeps_what_agrees(self) -> CorrectionSettings:
        if self.drop is not None and not 0 <= self.drop[0] <= 1 <= self.drop[1]:
            low, high = self.drop
            raise ValueError(
                f"drop [{low:g}, {high:g}] must be two ratios of 0 or more with 1 between them, such as [0.99, 1.01]: "
                "answers of the policy itself have the ratio 1"
            )
        return self


class ValueLossSettings(Section):
    """The clipped squared error."""

    clip: float | None = Field(default=0.2, gt=0)
    """A value counts as moved by at most this from what it was before the update; None does not clip."""
    per: Per = "token"
    """What the loss is a mean over."""


class PPOConfig(Section):
    """All of it: what `iteration` reads."""

    kl: KLSettings = KLSettings()
    scores: ScoreSettings = ScoreSettings()
    credit: CreditSettings = CreditSettings()
    policy: PolicyLossSettings = PolicyLossSettings()
    value: ValueLossSettings = ValueLossSettings()
    correct: CorrectionSettings | None = None
    """Weights for answers that other weights sampled; None counts all answers alike."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the responses of one iteration."""
    minibatches: int = Field(default=4, ge=1)
    """Optimiser steps in one pass."""
    critic_warmup: int = Field(default=0, ge=0)
    """In the first so many iterations only the critic learns."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The longest answer, which the overlong penalty is about."""
