"""Settings of rounds in which the policy answers prompts. Free of torch: stages make them of their own settings."""

from __future__ import annotations

from dataclasses import dataclass

from kedge.core.stage import PromptUse, TooLong
from kedge.models.settings import AutoSize
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
    too_long: TooLong
    sampling: SamplingSettings
    rows: AutoSize
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

    def prompt_use(self, *, under: str = "") -> PromptUse:
        """How prompts are asked in a round; `under` stands before the names of the inputs in the recipe."""
        sources = {f"{under}reward": self.reward, f"{under}gold": self.gold}
        return PromptUse(
            field=f"{under}prompts",
            max_tokens=self.max_prompt_tokens,
            max_new_tokens=self.sampling.max_new_tokens,
            too_long=self.too_long,
            rewards={field: source for field, source in sources.items() if source is not None},
            max_unscored=self.failures.max_share,
        )
