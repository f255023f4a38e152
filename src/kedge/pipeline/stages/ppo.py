"""Stage `ppo`: PPO with four roles (actor, critic, reward, reference)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.core.stage import Input, Stage
from kedge.pipeline.stages import words


class KLSettings(Section):
    """How the policy is held to the reference."""

    start: float = Field(default=0.05, ge=0)
    """The coefficient of the KL penalty at the beginning."""
    target: float | None = Field(default=None, gt=0)
    """KL in nats a sequence that the coefficient is steered towards; without it the coefficient stays fixed."""
    horizon: int = Field(default=10_000, ge=1)
    """How many responses it takes to correct an error; larger is slower."""
    limit: float | None = Field(default=None, gt=0)
    """The budget: when `kl/mean` passes it, `on_limit` happens."""
    on_limit: Literal["stop", "rollback"] = "stop"
    """Stop with everything saved, or go back to the last good checkpoint with a larger coefficient."""

    @model_validator(mode="after")
    def _limit_is_above_target(self) -> KLSettings:
        if self.target is not None and self.limit is not None and self.limit <= self.target:
            raise ValueError(
                f"limit {self.limit:g} must be above target {self.target:g}: the target would stop the run"
            )
        return self


class PPOSettings(Section):
    """Improve a policy against a reward while the reference holds it."""

    kind: Literal["ppo"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The policy to start from, and the reference; the recipe's `model` when absent."""
    reward: Annotated[str, Input("reward_model")]
    """Who scores the answers."""
    prompts: Annotated[str, Input("prompts")]
    """Prompts to answer."""
    roles: Literal["separate", "lora", "trunk"] = "lora"
    """How the four roles are held: four models, adapters on one base, or tops on one shared trunk."""
    iterations: int = Field(default=100, ge=1)
    """How many times to generate and learn."""
    batch: int = Field(default=128, ge=1)
    """Prompts in one iteration."""
    answers: int = Field(default=1, ge=1)
    """Answers sampled for each prompt."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the responses of one iteration."""
    minibatches: int = Field(default=4, ge=1)
    """Optimiser steps in one pass."""
    micro_batch: int = Field(default=8, ge=1)
    """Responses in memory at once; it changes speed and memory, never the update."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt; a longer one is refused, not cut."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling, and of the log-probabilities alike."""
    kl: KLSettings = KLSettings()
    """The anchor."""
    actor: OptimiserSettings = OptimiserSettings(lr=1e-6, eps=1e-5, schedule="constant")
    """AdamW of the policy."""
    critic: OptimiserSettings = OptimiserSettings(lr=5e-6, eps=1e-5, schedule="constant")
    """AdamW of the value model."""


def explain(settings: PPOSettings) -> list[str]:
    one = words.on_policy(settings.batch, settings.answers, settings.epochs, settings.minibatches, settings.micro_batch)
    total = settings.iterations * settings.batch * settings.answers
    return [*one, f"{words.count(settings.iterations, 'iteration')}: {words.count(total, 'response')} in all"]


def check(settings: PPOSettings) -> Iterator[Finding]:
    responses = settings.batch * settings.answers
    if settings.minibatches > responses:
        yield Finding(
            level="fatal",
            code="ppo.minibatches",
            message=f"{settings.minibatches} minibatches cannot be cut from {responses} responses",
            where="minibatches",
            fix=f"set minibatches to at most {responses}, or a larger batch",
        )
    if settings.kl.start == 0 and settings.kl.limit is None:
        yield Finding(
            level="warning",
            code="ppo.no_anchor",
            message="kl.start is 0 and there is no kl.limit: nothing holds the policy to the reference",
            where="kl",
            fix="set kl.start, or kl.limit so that the run stops before the reward is hacked",
        )


STAGE = Stage(
    summary="PPO with four roles: actor, critic, reward, reference.",
    settings=PPOSettings,
    makes={"model": "model"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_prompt_tokens,
)
