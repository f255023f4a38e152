"""Stage `drift`: what has changed between two rounds, of the policy, of the reward model and of its labels.

A recipe with `rounds` ends every round with it, and fills its settings in. It measures; what of it is too much is said
by `rounds.drift.limits`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kedge.core.stage import Input, PromptUse, ReadData, Stage
from kedge.rewards.settings import FailureSettings, RewardSourceSettings
from kedge.stages.shared.answering import AnsweringSettings
from kedge.stages.shared.batch_arithmetic import count


class DriftStageSettings(AnsweringSettings):
    """Compare a policy and a reward model with those of the round before."""

    kind: Literal["drift"]
    policy: Annotated[str | None, Input("model")] = None
    """The policy of this round."""
    previous: Annotated[str | None, Input("model")] = None
    """That of the round before."""
    first: Annotated[str | None, Input("model")] = None
    """The one that the first round began with."""
    prompts: Annotated[ReadData | None, Input("prompts")] = None
    """What both are asked."""
    number: int = Field(default=200, ge=1, alias="count")
    """So many of the prompts, from the first on."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Who knows what is good, and was never learnt from."""
    reward: Annotated[str | None, Input("reward_model")] = None
    """The reward model of this round."""
    previous_reward: Annotated[str | None, Input("reward_model")] = None
    """That of the round before."""
    anchor: Annotated[str | None, Input("pairs", "rankings")] = None
    """Pairs on which both reward models are asked."""
    heldout: Annotated[list[str], Input("pairs", "rankings", several=True)] = Field(default_factory=list[str])
    """Held-out labels of every round so far, this one's last."""
    answer_seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the answers: the same in all rounds, so that what differs is the policy."""
    tie: float = Field(default=1e-4, ge=0)
    """Scores that differ by no more than this are equal."""
    failures: FailureSettings = FailureSettings()
    """How many answers may go without a score."""

    @property
    def answers(self) -> int:
        """To each prompt, of each policy."""
        return 1


def explain(settings: DriftStageSettings) -> list[str]:
    lines: list[str] = []
    if settings.policy:
        others = [name for name in (settings.previous, settings.first) if name]
        beside = f" beside {' and '.join(dict.fromkeys(others))}" if others else ""
        lines.append(f"{settings.policy}{beside}, on at most {count(settings.number, 'prompt')}")
    if settings.reward:
        beside = f" beside {settings.previous_reward}" if settings.previous_reward else ""
        lines.append(f"{settings.reward}{beside}, on {count(len(settings.heldout), 'set')} of held-out labels")
    return lines


def prompt_use(settings: DriftStageSettings) -> PromptUse | None:
    if settings.policy is None or settings.prompts is None:
        return None
    return PromptUse(
        field="prompts",
        max_tokens=settings.max_prompt_tokens,
        max_new_tokens=settings.max_new_tokens,
        too_long=settings.too_long,
        rewards={} if settings.gold is None else {"gold": settings.gold},
        max_unscored=settings.failures.max_share,
    )


STAGE = Stage(
    summary="What has changed since the round before: policy, reward model, labels.",
    settings=DriftStageSettings,
    makes={"figures": "evaluation"},
    explain=explain,
    prompts=prompt_use,
    run="kedge.stages.drift.run:run",
)
