"""Stage `best_of_n`: sample N answers, let a reward choose, and teach the policy the choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, MixedData, Stage, TooLong
from kedge.core.stats import best_of_kl
from kedge.core.suggest import did_you_mean
from kedge.models.settings import AutoSize, LoraSettings, TrainingMemory, check_offload
from kedge.rewards.settings import FailureSettings, RewardSourceSettings
from kedge.rollout.settings import SamplingSettings
from kedge.runs.checkpoints import CheckpointSettings
from kedge.stages.rl.round_settings import RoundSettings
from kedge.stages.shared.batch_arithmetic import count, cut, supervised


class Rejection(Section):
    """Rejection sampling: imitate the best of N (Touvron et al. 2023, section 3.2.3), for some rounds."""

    kind: Literal["rejection"] = "rejection"
    rounds: int = Field(default=1, ge=1)
    """Each round samples from the model of the round before."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the chosen answers of a round."""
    above: float | None = None
    """Keep only chosen answers that score more than this."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Keep this share of the chosen answers, the best ones."""
    finished: bool = True
    """Keep only answers that ended by themselves: one that was cut off teaches not to end."""


class Bond(Section):
    """BOND (Sessa et al. 2024): match the distribution of the best of N answers of the model one starts from."""

    kind: Literal["bond"] = "bond"
    steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    anchors: int | None = Field(default=None, ge=2)
    """Answers of the starting model by which a score's quantile is estimated; n when absent, and never fewer."""
    answers: int = Field(default=2, ge=2)
    """Answers of the policy to each prompt of a step; the others are the baseline of each."""
    forward: float = Field(default=0.5, ge=0, le=1)
    """Weight of KL(best of N ‖ policy), which imitates; the rest is that of KL(policy ‖ best of N), which explores."""


NAMES: Final = ("rejection", "bond")


def _from_name(value: Any) -> Any:
    """`method: bond` is `method: {kind: bond}`."""
    name = cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", value)
    if name == "distil":
        raise ValueError("distil is called bond now")
    if name not in NAMES:
        raise ValueError(f"there is no method {name!r}{did_you_mean(str(name), NAMES)}; methods: {', '.join(NAMES)}")
    return {"kind": value} if isinstance(value, str) else value


Method = Annotated[Rejection | Bond, Field(discriminator="kind"), BeforeValidator(_from_name)]


class BestOfNSettings(Section):
    """Teach a policy to answer as the best of N of its answers."""

    kind: Literal["best_of_n"]
    base: Annotated[str | None, Input("model")] = Field(default=None, alias="from")
    """The policy to start from; the recipe's `model` when absent."""
    reward: Annotated[str | RewardSourceSettings, Input("reward_model")]
    """Who chooses: a reward stage or folder, or a source with its settings."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Another judge of the same answers, which never chooses: `gold/mean`."""
    prompts: Annotated[MixedData, Input("prompts")]
    """Prompts to answer."""
    n: int = Field(default=8, ge=2)
    """Answers of which the best is chosen."""
    method: Method = Rejection()
    """How the policy learns: `rejection`, `bond`, or one with settings `{kind: rejection, rounds: 3}`."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights; they are merged into the model at the end."""
    batch: int = Field(default=32, ge=1)
    """Prompts in one optimiser step."""
    micro_batch: Annotated[AutoSize, MayChange()] = "auto"
    """Answers in memory at once: `auto` is as many tokens as the device has room for and computes fastest, chosen at
    the start; a number is so many of them. It changes speed and memory, never the update."""
    max_steps: int | None = Field(default=None, ge=1)
    """The most optimiser steps, all rounds together; the learning rate falls to its end by then."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt."""
    too_long: TooLong = "refuse"
    """What happens to a longer one: `refuse` starts nothing, `drop` leaves it out, `cut` takes its beginning away."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    rows: Annotated[AutoSize, MayChange()] = "auto"
    """Answers sampled at once; `auto` is as many as have room. It changes speed and memory, never an answer."""
    failures: FailureSettings = FailureSettings()
    """How many answers may go without a score."""
    memory: TrainingMemory = TrainingMemory()
    """Types of the weights, recomputation, compilation."""
    optimiser: OptimiserSettings = OptimiserSettings()
    """AdamW and its schedule, which begins anew in each round."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """How often the run is saved; it always is at the end of a round."""
    samples: int = Field(default=4, ge=0)
    """Prompts whose answers are written down in each round."""

    def round_settings(self) -> RoundSettings:
        """How answers are drawn: those of a round, and for BOND also those of each step."""
        bond = self.method if isinstance(self.method, Bond) else None
        return RoundSettings(
            reward=self.reward,
            gold=self.gold,
            n=self.n,
            answers=max(self.n, bond.anchors or 0) if bond else self.n,
            max_prompt_tokens=self.max_prompt_tokens,
            too_long=self.too_long,
            sampling=self.sampling,
            rows=self.rows,
            failures=self.failures,
            samples=self.samples,
            batch=self.batch,
            step_answers=bond.answers if bond else 1,
        )

    @model_validator(mode="after")
    def _bond_needs_whole_distributions(self) -> BestOfNSettings:
        if isinstance(self.method, Bond) and not self.round_settings().measures_kl:
            raise ValueError("method 'bond' compares log-probs of whole distributions: leave out top_p and top_k")
        return self


def explain(settings: BestOfNSettings) -> list[str]:
    lines = [f"the best of {settings.n} is {best_of_kl(settings.n):.2f} nats from one answer, at most"]
    match settings.method:
        case Rejection(rounds=rounds, epochs=epochs):
            lines.append(f"{count(rounds, 'round')} of {count(settings.n, 'answer')} to each prompt")
            return lines + supervised(
                settings.batch, settings.micro_batch, epochs, "chosen answer", max_steps=settings.max_steps
            )
        case Bond(steps=steps, answers=answers):
            rows = settings.batch * (answers + 1)
            lines.append(
                f"{count(settings.round_settings().answers, 'answer')} of the starting model to each prompt, once"
            )
            return [
                *lines,
                f"{count(steps, 'optimiser step')} of {count(settings.batch, 'prompt')} × (1 chosen answer "
                f"and {answers} of the policy) = {count(rows, 'row')}, {cut(rows, settings.micro_batch)}",
            ]


def check(settings: BestOfNSettings) -> Iterator[Finding]:
    yield from check_offload("best_of_n", settings.memory, {"optimiser": settings.optimiser})
    if settings.sampling.top_k == 1:
        yield Finding(
            level="fatal",
            code="best_of_n.greedy",
            message=f"sampling.top_k is 1: all {settings.n} answers to a prompt would be the same",
            where="sampling.top_k",
            fix="leave top_k out",
        )


STAGE = Stage(
    summary="Best-of-N: chosen answers are imitated, or their distribution is distilled.",
    settings=BestOfNSettings,
    makes={"model": "model", "demonstrations": "demonstrations"},
    explain=explain,
    check=check,
    window=lambda settings: settings.max_prompt_tokens,
    prompts=lambda settings: settings.round_settings().prompt_use(),
    run="kedge.stages.best_of_n.train:train",
)
