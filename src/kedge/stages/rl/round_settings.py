"""Settings of rounds in which the policy answers prompts. Free of torch: stages make them of their own settings."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.rewards.settings import FailureSettings, RewardSourceSettings
from kedge.rollout.settings import SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How the answers of a round are drawn, scored and logged."""

    reward: str | RewardSourceSettings
    gold: str | RewardSourceSettings | None
    n: int
    """Of the first n answers to each prompt the best is reported."""
    answers: int
    """Answers to each prompt in a round, n at least."""
    max_prompt_tokens: int
    sampling: SamplingSettings
    rows: int
    """Answers that are sampled at once."""
    failures: FailureSettings
    samples: int
    """Prompts whose answers are written to `samples.jsonl`."""
    batch: int = 1
    """Prompts in one optimiser step, for methods that also sample between steps."""
    step_answers: int = 1
    """Answers to each of them."""

    @property
    def measures_kl(self) -> bool:
        """Whether answers come from the whole distribution: those from a part of it say nothing about the KL."""
        return self.sampling.top_p == 1 and self.sampling.top_k is None
