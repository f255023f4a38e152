"""Settings of online preference: rounds in which the policy answers, a reward source judges, and pairs are learnt.

Free of torch, so that a recipe is checked without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import Input, MayChange, MixedData, TooLong
from kedge.models.settings import AutoSize
from kedge.rewards.settings import FailureSettings, RewardSourceSettings
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.round_settings import RoundSettings
from kedge.stages.shared.batch_arithmetic import count


class OnlineSettings(Section):
    """Preferences among the policy's own answers, made anew in each round (Xu et al. 2023; Guo et al. 2024)."""

    rounds: int = Field(default=3, ge=1)
    """Each round draws from the policy of the round before, makes pairs, and learns them for `epochs` passes."""
    prompts: Annotated[MixedData, Input("prompts")]
    """Prompts that are answered in every round."""
    reward: Annotated[str | RewardSourceSettings, Input("reward_model")]
    """Who prefers: a reward stage or folder, or a source with its settings."""
    gold: Annotated[str | RewardSourceSettings | None, Input("reward_model")] = None
    """Another judge of the same answers, which prefers nothing: `gold/mean`."""
    answers: int = Field(default=4, ge=2)
    """Answers to each prompt in a round."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Of the answers to a prompt: the best against the worst, or every two whose scores differ."""
    finished: bool = True
    """Choose only answers that ended by themselves: one that was cut off teaches not to end. It may be rejected."""
    reference: Literal["start", "round"] = "start"
    """What holds the policy: the model that the stage started from, or the policy at the beginning of the round."""
    offline: float = Field(default=1.0, gt=0)
    """Where `data` is given: so many of its pairs beside each new one, drawn anew in each round."""
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

    @property
    def longest(self) -> int:
        """The most tokens that prompt and answer can have."""
        return self.max_prompt_tokens + self.sampling.max_new_tokens

    def round_settings(self, *, samples: int) -> RoundSettings:
        """How the answers of a round are drawn."""
        return RoundSettings(
            reward=self.reward,
            gold=self.gold,
            n=self.answers,
            answers=self.answers,
            max_prompt_tokens=self.max_prompt_tokens,
            too_long=self.too_long,
            sampling=self.sampling,
            rows=self.rows,
            failures=self.failures,
            samples=samples,
        )


def explain_online(online: OnlineSettings, *, with_data: bool) -> list[str]:
    """
    >>> given = {"prompts": "prompts.jsonl", "reward": "reward", "rounds": 2, "pairs": "all"}
    >>> print(*explain_online(OnlineSettings.model_validate(given), with_data=True), sep=chr(10))
    2 rounds of 4 answers of the policy to each prompt, which make at most 6 pairs a prompt
    beside each new pair 1 of `data`, drawn anew in each round
    """
    most = 1 if online.pairs == "best_worst" else online.answers * (online.answers - 1) // 2
    rounds = (
        f"{count(online.rounds, 'round')} of {count(online.answers, 'answer')} of the policy to each prompt, which "
        f"make at most {count(most, 'pair')} a prompt"
    )
    offline = f"beside each new pair {online.offline:g} of `data`, drawn anew in each round"
    return [rounds, offline] if with_data else [rounds]


def check_online(online: OnlineSettings) -> Iterator[Finding]:
    if online.sampling.top_k == 1:
        yield Finding(
            level="fatal",
            code="preference.greedy",
            message=f"online.sampling.top_k is 1: all {online.answers} answers to a prompt would be the same",
            where="online.sampling.top_k",
            fix="leave top_k out",
        )
